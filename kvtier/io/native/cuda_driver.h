// CUDA driver, loaded on first use, so that the same build serves hosts without one. The functions are declared here as
// in cuda.h (12 and 13 agree), so that no CUDA header is needed.
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

// Every function gives 0 or a CUresult.
struct CudaDriver {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int* version);
  int (*cuGetErrorName)(int error, const char** name);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDevicePrimaryCtxRetain)(CuContext* context, int device);
  int (*cuDevicePrimaryCtxRelease)(int device);
  int (*cuCtxSetCurrent)(CuContext context);
  int (*cuCtxPushCurrent)(CuContext context);
  int (*cuCtxPopCurrent)(CuContext* context);
  int (*cuThreadExchangeStreamCaptureMode)(int* mode);
  int (*cuStreamCreate)(CuStream* stream, unsigned flags);
  int (*cuStreamSynchronize)(CuStream stream);
  int (*cuStreamDestroy)(CuStream stream);
  int (*cuEventCreate)(CuEvent* event, unsigned flags);
  int (*cuEventRecord)(CuEvent event, CuStream stream);
  int (*cuEventQuery)(CuEvent event);
  int (*cuEventSynchronize)(CuEvent event);
  int (*cuEventDestroy)(CuEvent event);
  int (*cuMemcpyHtoDAsync)(uint64_t target, const void* source, size_t bytes, CuStream stream);
  int (*cuMemHostRegister)(void* address, size_t bytes, unsigned flags);
  int (*cuMemHostUnregister)(void* address);

  // Throws CudaFailed with the call and the name of the error.
  void check(int result, const char* call) const;
};

class CudaFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The host's driver. Throws CudaFailed when there is none, naming what is missing.
const CudaDriver& cuda_driver();

// Another library in its place from now on (a double, in tests); null: the host's own again. What was opened through
// the former goes on with it: a library is never unloaded.
void use_cuda_library(const char* path);

// The context that a device's users share (torch's too), held as long as this lives.
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

// Makes a context the calling thread's own for a while; then the one before is current again, which on a thread of
// the application's is not ours to change (torch takes its device from it). Meanwhile the thread's capture mode is
// relaxed: while an engine records a CUDA graph, many calls (registering memory, asking an event) would else fail and
// spoil the recording, although they have nothing to do with its stream.
class CurrentContext {
 public:
  explicit CurrentContext(const PrimaryContext& context);  // throws CudaFailed
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const CudaDriver& driver_;
  int capture_mode_ = kCudaRelaxedCapture;  // of the thread before
};

}  // namespace kvtier
