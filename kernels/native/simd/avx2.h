// AVX2, FMA and F16C; see simd/README.md.
#pragma once
