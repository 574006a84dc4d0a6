// Plain C++ for any machine; see simd/README.md.
#pragma once
