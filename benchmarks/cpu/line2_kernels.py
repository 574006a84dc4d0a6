"""Line 2: kernels against the reference, with sanitizers, without AVX-512, and on aarch64.

tests/kernels covers all of it: hypothesis over shapes, odd sizes, NaN and infinity; the C++ tests
under ASan and UBSan, on emulated x86-64 machines without AVX-512 or AVX2, and cross-compiled. No
test may be skipped: .ci/run installs the compilers and emulators.
"""

import json

from pytest_line import run_tests

print(json.dumps(run_tests("tests/kernels")))
