// Declares the part of the CUDA driver's header that the core uses, for the tests' CUDA runtime
// (cuda_stub.h).
#pragma once

using CUdevice = int;
enum CUresult : int { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_DEVICE = 101 };

extern "C" CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active);
