# The compiler flags of each instruction set, for the kernels and their tests.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# No contraction: fused operations are explicit fma calls, so that all targets round alike.
set(NATIVE_OPTIONS -ffp-contract=off -fno-math-errno -fno-trapping-math
  -Wall -Wextra -Wno-unused-function)
if(PDSERVE_SANITIZE)  # of -fsanitize=, e.g. address,undefined or thread
  list(APPEND NATIVE_OPTIONS -O1 -g1 -fsanitize=${PDSERVE_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${PDSERVE_SANITIZE})
else()
  set(PDSERVE_OPTIMIZE "-O3" CACHE STRING "Level of optimization")
  list(APPEND NATIVE_OPTIONS ${PDSERVE_OPTIMIZE})
endif()
# Kernels are one large function each: sanitizer checks by calls compile in half the time. Kernels
# use no threads, so the thread sanitizer has nothing to check in them.
if(PDSERVE_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND NATIVE_OPTIONS --param asan-instrumentation-with-call-threshold=0
    -fno-sanitize-address-use-after-scope)
elseif(PDSERVE_SANITIZE MATCHES "thread")
  set(NATIVE_KERNELS -fno-sanitize=thread)
endif()
# GCC 12 warns about values that its own AVX-512 header leaves undefined.
set(NATIVE_AVX512 ${NATIVE_KERNELS} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
  -mavx512bf16 -mfma -mf16c
  -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized)
# GCC 12 splits and delays integer sums of vectors, so that the 16 registers do not suffice: without
# these two passes, products of 4 and 8 bits are 1.1 to 1.3 times as fast.
set(NATIVE_AVX2 ${NATIVE_KERNELS} -mavx2 -mfma -mf16c)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND NATIVE_AVX2 -fno-tree-ter -fno-tree-reassoc)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(NATIVE_X86 ON)
endif()
