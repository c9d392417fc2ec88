// The CPU loops for AVX2. Only this file is compiled with -mavx2, and the loops run only after best_isa() found AVX2.
#define PAC_ISA avx2
#include "codec/cpu_loops.hpp"
