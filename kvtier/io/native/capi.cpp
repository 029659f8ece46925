// C interface of the library, for kvtier/io/native.py, ring.py, ranges.py and cuda.py. Throws no exception. Functions
// that return int give 0 or an errno, if nothing else is stated; with EREMOTEIO, `message` holds CUDA's error.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "checksum.h"
#include "engine.h"
#include "launch.h"
#include "pinned.h"
#include "range_job.h"

using namespace kvtier;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Handles.
using kvtier_ring = std::shared_ptr<Engine>;
using kvtier_slots = std::shared_ptr<RangeSlots>;
using kvtier_range_job = std::shared_ptr<RangeJob>;
struct kvtier_batch {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Batch> batch;
};

namespace {

constexpr uint64_t kPieceBytesMax = uint64_t{1} << 30;
constexpr uint64_t kOpBytesMax = uint64_t{1} << 40;
constexpr uint32_t kDeviceSlotsMax = 1024;

bool whole_pages(uint64_t value) { return value % kPageBytes == 0; }

// A read into device memory cannot be verified here.
bool are_valid_flags(const OpSpec& spec) {
  return spec.flags == 0 || spec.flags == kVerify || (spec.kind == kRead && spec.flags == kOnDevice);
}

bool is_valid(const OpSpec& spec) {
  if (spec.kind == kFlush)
    return spec.offset == 0 && spec.address == 0 && spec.slab_bytes == 0 && spec.n_slabs == 0 && spec.flags == 0;
  return (spec.kind == kRead || spec.kind == kWrite) && spec.offset >= 0 &&
         whole_pages(static_cast<uint64_t>(spec.offset)) && spec.address != 0 && whole_pages(spec.address) &&
         spec.slab_bytes > 0 && whole_pages(spec.slab_bytes) && spec.n_slabs > 0 &&
         spec.n_slabs <= kSlabsMax && spec.slab_bytes <= kOpBytesMax / spec.n_slabs && are_valid_flags(spec);
}

bool is_valid_piece(uint64_t bytes) { return bytes > 0 && whole_pages(bytes) && bytes <= kPieceBytesMax; }

bool is_valid(const EngineOptions& options) {
  if (options.has_device() && (!is_valid_piece(options.device_piece_bytes) || options.device_slots < 1 ||
                               options.device_slots > kDeviceSlotsMax))
    return false;
  return is_valid_piece(options.read_piece_bytes) && is_valid_piece(options.write_piece_bytes) &&
         options.threads >= 1 && options.threads <= 1024 && options.queued_ops_max >= 1;
}

constexpr int64_t kPlaceMax = int64_t{1} << 62;

bool is_valid(const RangeOptions& options) {
  return options.threads >= 1 && options.threads <= 1024 && options.slots >= 1 && options.slots <= 1024 &&
         options.block_bytes > 0 && options.block_bytes % kPageBytes == 0 && options.piece_bytes > 0 &&
         options.piece_bytes % options.block_bytes == 0 && options.piece_bytes <= kPieceBytesMax;
}

// Products of rows and pitch must not overflow.
bool is_place(int64_t offset, int64_t rows, int64_t pitch) {
  return offset >= 0 && offset < kPlaceMax && pitch >= 0 && (rows == 1 || pitch < kPlaceMax / rows);
}

bool is_valid(const RangeCopy& copy, size_t n_files, size_t n_targets) {
  if (copy.file < 0 || copy.file >= static_cast<int64_t>(n_files)) return false;
  if (copy.target < 0 || copy.target >= static_cast<int64_t>(n_targets)) return false;
  if (copy.rows < 1 || copy.row_bytes < 1 || copy.row_bytes > kPlaceMax / copy.rows) return false;
  if (copy.rows > 1 && std::min(copy.source_pitch, copy.target_pitch) < copy.row_bytes) return false;
  return is_place(copy.offset, copy.rows, copy.source_pitch) &&
         is_place(copy.target_offset, copy.rows, copy.target_pitch);
}

struct Pinned {
  std::mutex mutex;
  std::map<uintptr_t, std::unique_ptr<PinnedRange>> ranges;  // by address
};

// Never destroyed: at process exit the driver may be destroyed first.
Pinned& pinned() {
  static Pinned* only = new Pinned;
  return *only;
}

// Calls `function`. Returns 0 or an errno; with EREMOTEIO, `message` holds CUDA's error.
template <typename Function>
int without_exceptions(char* message, size_t message_bytes, Function function) {
  try {
    function();
    return 0;
  } catch (const CudaFailed& failed) {
    std::snprintf(message, message_bytes, "%s", failed.what());
    return EREMOTEIO;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

}  // namespace

EXPORT int kvtier_instruction_sets() { return kInstructionSets; }

// Name of a version, or null if this processor does not run it. `which` < 0: the fastest.
EXPORT const char* kvtier_instruction_set(int which) {
  if (which < 0) return best_instruction_set().name;
  const InstructionSet& set = instruction_sets()[which];
  return set.usable ? set.name : nullptr;
}

EXPORT uint64_t kvtier_checksum(int which, const uint8_t* data, size_t bytes, uint64_t seed, uint64_t first_pair) {
  const InstructionSet& set = which < 0 ? best_instruction_set() : instruction_sets()[which];
  return set.sum(data, bytes, seed, first_pair);
}

// Read system calls of this process's engines.
EXPORT uint64_t kvtier_reads_issued() { return reads_issued(); }

EXPORT void kvtier_slab_checksums(const uint8_t* data, size_t slab_bytes, uint32_t n_slabs, const uint8_t* key,
                                  uint32_t first_head, uint32_t first_layer, uint64_t* sums) {
  const SumFunction sum = best_instruction_set().sum;
  for (uint32_t i = 0; i < n_slabs; i++)
    sums[i] = sum(data + i * slab_bytes, slab_bytes, slab_seed(key, first_head + i, first_layer), 0);
}

EXPORT int kvtier_ring_open(const EngineOptions* options, kvtier_ring** ring, char* message, size_t message_bytes) {
  if (!is_valid(*options)) return EINVAL;
  return without_exceptions(message, message_bytes, [&] { *ring = new kvtier_ring(Engine::start(*options)); });
}

// See Engine::widen.
EXPORT int kvtier_ring_widen(kvtier_ring* ring, int64_t hung_after_ns, char* message, size_t message_bytes) {
  return without_exceptions(message, message_bytes, [&] { (*ring)->widen(std::chrono::nanoseconds(hung_after_ns)); });
}

// Frees the handle. Returns 1 if all threads have ended, 0 if some hang and keep running.
EXPORT int kvtier_ring_close(kvtier_ring* ring, int64_t timeout_ns) {
  const bool ended = (*ring)->close(std::chrono::nanoseconds(timeout_ns));
  delete ring;
  return ended;
}

// Starts batches, each of the next `sizes[i]` operations, in order until one is refused: gives that errno, and handles
// of those that were started; null for the others. EINVAL: an operation is not whole aligned pages; ENODEV: it is for a
// device, and the ring has none; then none is started. `expected`: one checksum a slab of all operations.
EXPORT int kvtier_submit_batches(kvtier_ring* ring, const OpSpec* specs, const uint32_t* sizes, size_t n_batches,
                                 const uint64_t* expected, kvtier_batch** batches) {
  const OpSpec* end = specs;
  for (size_t i = 0; i < n_batches; i++) {
    batches[i] = nullptr;
    end += sizes[i];
  }
  for (const OpSpec* spec = specs; spec < end; spec++) {
    if (!is_valid(*spec)) return EINVAL;
    if ((spec->flags & kOnDevice) != 0 && !(*ring)->has_device()) return ENODEV;
  }
  try {
    for (size_t i = 0; i < n_batches; i++) {
      auto handle = std::make_unique<kvtier_batch>();
      handle->engine = *ring;
      handle->batch = std::make_shared<Batch>(specs, sizes[i], expected);
      specs += sizes[i];
      expected += handle->batch->slabs();
      if (const int error = (*ring)->submit(handle->batch)) return error;
      batches[i] = handle.release();
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
}

// Gives the state of each batch: 0: not done; 1: done; 2: done, and an operation failed or a checksum differs.
EXPORT void kvtier_batches_states(kvtier_batch* const* batches, size_t n_batches, uint8_t* states) {
  for (size_t i = 0; i < n_batches; i++)
    states[i] = !batches[i]->batch->done() ? 0 : batches[i]->batch->is_clean() ? 1 : 2;
}

// Returns 1 when the batch is done, 0 after the timeout.
EXPORT int kvtier_batch_wait(kvtier_batch* batch, int64_t timeout_ns) {
  return batch->batch->wait(std::chrono::nanoseconds(timeout_ns));
}

EXPORT void kvtier_batch_cancel(kvtier_batch* batch) { batch->engine->cancel(batch->batch); }

// Gives one errno an operation, and one checksum and one flag (1: not as expected) a slab. EBUSY: not done.
EXPORT int kvtier_batch_results(kvtier_batch* batch, int32_t* errors, uint64_t* sums, uint8_t* bad) {
  Batch& source = *batch->batch;
  if (!source.done()) return EBUSY;
  for (size_t i = 0; i < source.size(); i++) {
    const Op& op = source.op(i);
    errors[i] = op.error.load();
    for (uint32_t slab = 0; slab < op.spec.n_slabs; slab++) {
      sums[op.first_sum + slab] = source.sum(op.first_sum + slab);
      bad[op.first_sum + slab] = source.is_bad(op, slab);
    }
  }
  return 0;
}

// Frees the handles, of which some may be null; a batch stays until its last piece has returned.
EXPORT void kvtier_batches_free(kvtier_batch* const* batches, size_t n_batches) {
  for (size_t i = 0; i < n_batches; i++) delete batches[i];
}

// --- range reads ---

// EINVAL: options out of range.
EXPORT int kvtier_slots_open(const RangeOptions* options, kvtier_slots** slots, char* message, size_t message_bytes) {
  if (!is_valid(*options)) return EINVAL;
  return without_exceptions(message, message_bytes,
                            [&] { *slots = new kvtier_slots(std::make_shared<RangeSlots>(*options)); });
}

// Begins to make all buffers, so that the first read finds them.
EXPORT int kvtier_slots_prepare(kvtier_slots* slots, char* message, size_t message_bytes) {
  return without_exceptions(message, message_bytes, [&] { (*slots)->prepare(); });
}

// Frees the buffers, or leaves that to the last thread of a read.
EXPORT void kvtier_slots_free(kvtier_slots* slots) { delete slots; }

// Starts a read; at most one at a time uses the slots. EINVAL: a copy is out of range. Whether copies fit their targets
// is for the caller to check.
EXPORT int kvtier_range_start(kvtier_slots* slots, const RangeFile* files, size_t n_files, const RangeCopy* copies,
                              size_t n_copies, const RangeTarget* targets, size_t n_targets, kvtier_range_job** job,
                              char* message, size_t message_bytes) {
  if (n_copies > UINT32_MAX) return EINVAL;
  for (size_t i = 0; i < n_copies; i++)
    if (!is_valid(copies[i], n_files, n_targets)) return EINVAL;
  const RangeOptions& options = (*slots)->options;
  return without_exceptions(message, message_bytes, [&] {
    RangePlan plan({files, files + n_files}, {copies, copies + n_copies}, options.piece_bytes, options.block_bytes);
    auto handle = std::make_unique<kvtier_range_job>(
        std::make_shared<RangeJob>(*slots, std::move(plan), std::vector<RangeTarget>(targets, targets + n_targets)));
    (*handle)->start();
    *job = handle.release();
  });
}

// Returns 1 when all threads have ended, 0 after the timeout.
EXPORT int kvtier_range_wait(kvtier_range_job* job, int64_t timeout_ns) {
  return (*job)->wait(std::chrono::nanoseconds(timeout_ns));
}

EXPORT void kvtier_range_cancel(kvtier_range_job* job) { (*job)->cancel(); }

// Sets `file` and `offset`: all copies from earlier files, and from bytes of `file` before `offset`, have landed.
EXPORT void kvtier_range_progress(kvtier_range_job* job, uint64_t* landed, uint64_t* read, uint32_t* file,
                                  uint64_t* offset) {
  *landed = (*job)->bytes_landed();
  *read = (*job)->bytes_read();
  const RangePiece* missing = (*job)->first_missing();
  *file = missing != nullptr ? missing->file : UINT32_MAX;
  *offset = missing != nullptr ? missing->start : 0;
}

// Returns the first failure's errno, or 0. ENODATA: the file ends at `offset`.
EXPORT int kvtier_range_failure(kvtier_range_job* job, uint32_t* file, uint64_t* offset, char* message,
                                size_t message_bytes) {
  const RangeFailure failure = (*job)->failure();
  *file = failure.file;
  *offset = failure.offset;
  std::snprintf(message, message_bytes, "%s", failure.message.c_str());
  return failure.error;
}

// Frees the handle; a read under way goes on.
EXPORT void kvtier_range_free(kvtier_range_job* job) { delete job; }

// Bytes of a file in the page cache; -1: the kernel (before 6.5) or the file system does not say.
EXPORT int64_t kvtier_resident_bytes(int fd, uint64_t offset, uint64_t length) {
  return resident_bytes(fd, offset, length);
}

// --- CUDA ---

// For tests: replaces the driver by another library; null: the host's driver.
EXPORT void kvtier_cuda_load(const char* path) { use_cuda_library(path); }

// As CUDA counts: 13000 for 13.0.
EXPORT int kvtier_cuda_version(int* version, char* message, size_t message_bytes) {
  return without_exceptions(message, message_bytes, [&] {
    const CudaDriver& driver = cuda_driver();
    driver.check(driver.cuDriverGetVersion(version), "cuDriverGetVersion");
  });
}

// Sets the calling thread's capture mode for its lifetime.
EXPORT int kvtier_cuda_relax_thread(char* message, size_t message_bytes) {
  return without_exceptions(message, message_bytes, [&] {
    const CudaDriver& driver = cuda_driver();
    int mode = kCudaRelaxedCapture;
    driver.check(driver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
  });
}

EXPORT int kvtier_cuda_launch(const LaunchSpec* spec, char* message, size_t message_bytes) {
  return without_exceptions(message, message_bytes, [&] { launch(*spec); });
}

// EEXIST: that address is pinned already.
EXPORT int kvtier_cuda_pin(void* address, size_t bytes, int ordinal, char* message, size_t message_bytes) {
  return without_exceptions(message, message_bytes, [&] {
    auto context = std::make_shared<PrimaryContext>(ordinal);
    // Registering a large arena takes many seconds, so it is done before the lock is taken.
    auto range = std::make_unique<PinnedRange>(std::move(context), address, bytes);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    if (!pinned().ranges.try_emplace(reinterpret_cast<uintptr_t>(address), std::move(range)).second)
      throw std::system_error(EEXIST, std::generic_category());
  });
}

// ENOENT: nothing is pinned there. After EREMOTEIO the memory must not be freed.
EXPORT int kvtier_cuda_unpin(void* address, char* message, size_t message_bytes) {
  std::unique_lock<std::mutex> lock(pinned().mutex);
  const auto found = pinned().ranges.extract(reinterpret_cast<uintptr_t>(address));
  lock.unlock();
  if (!found) return ENOENT;
  return without_exceptions(message, message_bytes, [&] { found.mapped()->release(); });
}
