// C interface of the engine, for kvtier/io/native.py and ring.py. Throws no exception. Functions that return int give 0
// or an errno, if nothing else is stated; with EREMOTEIO, `message` holds CUDA's error.
#include <cerrno>
#include <new>

#include "checksum.h"
#include "engine.h"
#include "without_exceptions.h"

using kvtier::Batch;
using kvtier::Engine;
using kvtier::EngineOptions;
using kvtier::OpSpec;

#define EXPORT extern "C" __attribute__((visibility("default")))

struct kvtier_ring {
  std::shared_ptr<Engine> engine;
};

struct kvtier_batch {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Batch> batch;
};

namespace {

constexpr uint64_t kPieceBytesMax = uint64_t{1} << 30;
constexpr uint64_t kOpBytesMax = uint64_t{1} << 40;
constexpr uint32_t kDeviceSlotsMax = 1024;

bool whole_pages(uint64_t value) { return value % kvtier::kPageBytes == 0; }

// A read into device memory cannot be verified here.
bool are_valid_flags(const OpSpec& spec) {
  return spec.flags == 0 || spec.flags == kvtier::kVerify ||
         (spec.kind == kvtier::kRead && spec.flags == kvtier::kOnDevice);
}

bool is_valid(const OpSpec& spec) {
  if (spec.kind == kvtier::kFlush)
    return spec.offset == 0 && spec.address == 0 && spec.slab_bytes == 0 && spec.n_slabs == 0 && spec.flags == 0;
  return (spec.kind == kvtier::kRead || spec.kind == kvtier::kWrite) && spec.offset >= 0 &&
         whole_pages(static_cast<uint64_t>(spec.offset)) && spec.address != 0 && whole_pages(spec.address) &&
         spec.slab_bytes > 0 && whole_pages(spec.slab_bytes) && spec.n_slabs > 0 &&
         spec.n_slabs <= kvtier::kSlabsMax && spec.slab_bytes <= kOpBytesMax / spec.n_slabs && are_valid_flags(spec);
}

bool is_valid_piece(uint64_t bytes) { return bytes > 0 && whole_pages(bytes) && bytes <= kPieceBytesMax; }

bool is_valid(const EngineOptions& options) {
  if (options.has_device() && (!is_valid_piece(options.device_piece_bytes) || options.device_slots < 1 ||
                               options.device_slots > kDeviceSlotsMax))
    return false;
  return is_valid_piece(options.read_piece_bytes) && is_valid_piece(options.write_piece_bytes) &&
         options.threads >= 1 && options.threads <= 1024 && options.queued_ops_max >= 1;
}

}  // namespace

EXPORT int kvtier_instruction_sets() { return kvtier::kInstructionSets; }

// Name of a version, or null if this processor does not run it. `which` < 0: the fastest.
EXPORT const char* kvtier_instruction_set(int which) {
  if (which < 0) return kvtier::best_instruction_set().name;
  const kvtier::InstructionSet& set = kvtier::instruction_sets()[which];
  return set.usable ? set.name : nullptr;
}

EXPORT uint64_t kvtier_checksum(int which, const uint8_t* data, size_t bytes, uint64_t seed, uint64_t first_pair) {
  const kvtier::InstructionSet& set =
      which < 0 ? kvtier::best_instruction_set() : kvtier::instruction_sets()[which];
  return set.sum(data, bytes, seed, first_pair);
}

// Read system calls of this process's engines.
EXPORT uint64_t kvtier_reads_issued() { return kvtier::reads_issued(); }

EXPORT void kvtier_slab_checksums(const uint8_t* data, size_t slab_bytes, uint32_t n_slabs, const uint8_t* key,
                                  uint32_t first_head, uint32_t first_layer, uint64_t* sums) {
  const kvtier::SumFunction sum = kvtier::best_instruction_set().sum;
  for (uint32_t i = 0; i < n_slabs; i++)
    sums[i] = sum(data + i * slab_bytes, slab_bytes, kvtier::slab_seed(key, first_head + i, first_layer), 0);
}

EXPORT int kvtier_ring_open(const EngineOptions* options, kvtier_ring** ring, char* message, size_t message_bytes) {
  if (!is_valid(*options)) return EINVAL;
  return kvtier::without_exceptions(message, message_bytes, [&] { *ring = new kvtier_ring{Engine::start(*options)}; });
}

// Frees the handle. Returns 1 if all threads have ended, 0 if some hang and keep running.
EXPORT int kvtier_ring_close(kvtier_ring* ring, int64_t timeout_ns) {
  const bool ended = ring->engine->close(std::chrono::nanoseconds(timeout_ns));
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
    if ((spec->flags & kvtier::kOnDevice) != 0 && !ring->engine->has_device()) return ENODEV;
  }
  try {
    for (size_t i = 0; i < n_batches; i++) {
      auto handle = std::make_unique<kvtier_batch>();
      handle->engine = ring->engine;
      handle->batch = std::make_shared<Batch>(specs, sizes[i], expected);
      specs += sizes[i];
      expected += handle->batch->slabs();
      if (const int error = ring->engine->submit(handle->batch)) return error;
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
    const kvtier::Op& op = source.op(i);
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
