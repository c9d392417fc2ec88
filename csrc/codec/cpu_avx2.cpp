// The host loops for AVX2. This file alone is compiled with -mavx2, and nothing in it runs before
// best_isa() has asked the machine.
#define PAC_ISA avx2
#include "codec/cpu_loops.hpp"
