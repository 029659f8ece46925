// CUDA driver, loaded on first use: the same build runs on hosts without one. Functions are declared as in cuda.h (12
// and 13 agree), so that no CUDA header is needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace kvtier {

using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;

constexpr int kCudaNotReady = 600;
constexpr unsigned kCudaNonBlockingStream = 1;
constexpr unsigned kCudaPortableMemory = 1;
constexpr unsigned kCudaBlockingSync = 1, kCudaNoTiming = 2;  // of an event
constexpr int kCudaRelaxedCapture = 2;
constexpr unsigned kCudaHostMemory = 1, kCudaDeviceMemory = 2;

// CUDA_MEMCPY2D.
struct CuMemcpy2D {
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  uint64_t source_device;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned target_type;
  void* target_host;
  uint64_t target_device;
  void* target_array;
  size_t target_pitch;
  size_t width_bytes, height;
};
static_assert(sizeof(CuMemcpy2D) == 128, "the layout is CUDA's");

// Functions used: name, suffix of the symbol, parameters. Each returns 0 or a CUresult.
#define KVTIER_CUDA_FUNCTIONS(FUNCTION)                                                                    \
  FUNCTION(cuInit, "", (unsigned flags))                                                                   \
  FUNCTION(cuDriverGetVersion, "", (int* version))                                                         \
  FUNCTION(cuGetErrorName, "", (int error, const char** name))                                             \
  FUNCTION(cuDeviceGet, "", (int* device, int ordinal))                                                    \
  FUNCTION(cuDevicePrimaryCtxRetain, "", (CuContext* context, int device))                                 \
  FUNCTION(cuDevicePrimaryCtxRelease, "_v2", (int device))                                                 \
  FUNCTION(cuCtxSetCurrent, "", (CuContext context))                                                       \
  FUNCTION(cuCtxPushCurrent, "_v2", (CuContext context))                                                   \
  FUNCTION(cuCtxPopCurrent, "_v2", (CuContext* context))                                                   \
  FUNCTION(cuThreadExchangeStreamCaptureMode, "", (int* mode))                                             \
  FUNCTION(cuStreamCreate, "", (CuStream* stream, unsigned flags))                                         \
  FUNCTION(cuStreamSynchronize, "", (CuStream stream))                                                     \
  FUNCTION(cuStreamDestroy, "_v2", (CuStream stream))                                                      \
  FUNCTION(cuEventCreate, "", (CuEvent* event, unsigned flags))                                            \
  FUNCTION(cuEventRecord, "", (CuEvent event, CuStream stream))                                            \
  FUNCTION(cuEventQuery, "", (CuEvent event))                                                              \
  FUNCTION(cuEventSynchronize, "", (CuEvent event))                                                        \
  FUNCTION(cuEventDestroy, "_v2", (CuEvent event))                                                         \
  FUNCTION(cuMemcpyHtoDAsync, "_v2", (uint64_t target, const void* source, size_t bytes, CuStream stream)) \
  FUNCTION(cuMemcpyDtoHAsync, "_v2", (void* target, uint64_t source, size_t bytes, CuStream stream))       \
  FUNCTION(cuLaunchKernel, "",                                                                             \
           (void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x,         \
            unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CuStream stream,                \
            void** arguments, void** extra))                                                               \
  FUNCTION(cuMemcpy2DAsync, "_v2", (const CuMemcpy2D* rows, CuStream stream))                              \
  FUNCTION(cuMemHostRegister, "_v2", (void* address, size_t bytes, unsigned flags))                        \
  FUNCTION(cuMemHostUnregister, "", (void* address))

struct CudaDriver {
#define KVTIER_CUDA_MEMBER(name, suffix, parameters) int(*name) parameters;
  KVTIER_CUDA_FUNCTIONS(KVTIER_CUDA_MEMBER)
#undef KVTIER_CUDA_MEMBER

  // Throws CudaFailed with the call and the name of the error if `result` is not 0.
  void check(int result, const char* call) const;
};

class CudaFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The host's driver. Throws CudaFailed with the missing library or symbol.
const CudaDriver& cuda_driver();

// Replaces the driver by another library (a test double); null: the host's driver again. Objects that were opened
// through the former library keep using it: a library is never unloaded.
void use_cuda_library(const char* path);

// Primary context of a device, shared with its other users (torch too) and retained for this object's lifetime.
class PrimaryContext {
 public:
  explicit PrimaryContext(int ordinal);  // throws CudaFailed
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  const CudaDriver& driver;
  CuContext handle() const { return handle_; }

 private:
  int device_ = 0;
  CuContext handle_ = nullptr;
};

// Makes a context current on the calling thread, and restores the former one at the end (torch takes its device from
// it). In between the thread's capture mode is relaxed: while an engine records a CUDA graph, calls such as registering
// memory or querying an event would else fail and invalidate the graph, although they do not concern its stream.
class CurrentContext {
 public:
  explicit CurrentContext(const PrimaryContext& context);  // throws CudaFailed
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const CudaDriver& driver_;
  int capture_mode_ = kCudaRelaxedCapture;  // then the thread's former mode
};

}  // namespace kvtier
