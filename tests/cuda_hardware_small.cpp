/// @file
/// cuda_hardware_small.cpp -- the hardware check as C++, its rows at small sizes on the emulator.
#include "cuda_hardware_check.cu"
