// C interface of range reads, for kvtier/io/ranges.py. Throws no exception. Functions that return int give 0 or an
// errno; with EREMOTEIO, `message` holds CUDA's error.
#include <algorithm>
#include <cstring>

#include "batch.h"
#include "range_job.h"
#include "transfer.h"
#include "without_exceptions.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using kvtier::RangeCopy;
using kvtier::RangeFile;
using kvtier::RangeJob;
using kvtier::RangeOptions;
using kvtier::RangeSlots;
using kvtier::RangeTarget;

struct kvtier_slots {
  std::shared_ptr<RangeSlots> slots;
};

struct kvtier_range_job {
  std::shared_ptr<RangeJob> job;
};

namespace {

constexpr uint64_t kRangePieceMax = uint64_t{1} << 30;
constexpr int64_t kPlaceMax = int64_t{1} << 62;

bool is_valid(const RangeOptions& options) {
  return options.threads >= 1 && options.threads <= 1024 && options.slots >= 1 && options.slots <= 1024 &&
         options.block_bytes > 0 && options.block_bytes % kvtier::kPageBytes == 0 && options.piece_bytes > 0 &&
         options.piece_bytes % options.block_bytes == 0 && options.piece_bytes <= kRangePieceMax;
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

}  // namespace

// EINVAL: options out of range.
EXPORT int kvtier_slots_open(const RangeOptions* options, kvtier_slots** slots, char* message, size_t message_bytes) {
  if (!is_valid(*options)) return EINVAL;
  return kvtier::without_exceptions(message, message_bytes,
                                    [&] { *slots = new kvtier_slots{std::make_shared<RangeSlots>(*options)}; });
}

// Begins to make all buffers, so that the first read finds them.
EXPORT int kvtier_slots_prepare(kvtier_slots* slots, char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] { slots->slots->prepare(); });
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
  const RangeOptions& options = slots->slots->options;
  return kvtier::without_exceptions(message, message_bytes, [&] {
    kvtier::RangePlan plan({files, files + n_files}, {copies, copies + n_copies}, options.piece_bytes,
                           options.block_bytes);
    auto handle = std::make_unique<kvtier_range_job>();
    handle->job = std::make_shared<RangeJob>(slots->slots, std::move(plan),
                                             std::vector<RangeTarget>(targets, targets + n_targets));
    handle->job->start();
    *job = handle.release();
  });
}

// Returns 1 when all threads have ended, 0 after the timeout.
EXPORT int kvtier_range_wait(kvtier_range_job* job, int64_t timeout_ns) {
  return job->job->wait(std::chrono::nanoseconds(timeout_ns));
}

EXPORT void kvtier_range_cancel(kvtier_range_job* job) { job->job->cancel(); }

// All copies of earlier files, and of bytes of `file` before `offset`, have landed.
EXPORT void kvtier_range_progress(kvtier_range_job* job, uint64_t* landed, uint64_t* read, uint32_t* file,
                                  uint64_t* offset) {
  *landed = job->job->bytes_landed();
  *read = job->job->bytes_read();
  const kvtier::RangePiece* missing = job->job->first_missing();
  *file = missing != nullptr ? missing->file : UINT32_MAX;
  *offset = missing != nullptr ? missing->start : 0;
}

// Returns the first failure's errno, or 0. ENODATA: the file ends at `offset`.
EXPORT int kvtier_range_failure(kvtier_range_job* job, uint32_t* file, uint64_t* offset, char* message,
                                size_t message_bytes) {
  const kvtier::RangeFailure failure = job->job->failure();
  *file = failure.file;
  *offset = failure.offset;
  std::snprintf(message, message_bytes, "%s", failure.message.c_str());
  return failure.error;
}

// Frees the handle; a read under way goes on.
EXPORT void kvtier_range_free(kvtier_range_job* job) { delete job; }

// Bytes of a file in the page cache; -1: the kernel (before 6.5) or the file system does not say.
EXPORT int64_t kvtier_resident_bytes(int fd, uint64_t offset, uint64_t length) {
  return kvtier::resident_bytes(fd, offset, length);
}
