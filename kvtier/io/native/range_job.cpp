#include "range_job.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "batch.h"
#include "transfer.h"
#include "worker_thread.h"

namespace kvtier {
namespace {

constexpr uint64_t kPitchMax = uint64_t{1} << 31;  // of cuMemcpy2DAsync, exclusive

}  // namespace

RangeSlots::RangeSlots(const RangeOptions& given) : options(given), of_threads(given.threads) {
  if (options.has_device()) context = std::make_shared<PrimaryContext>(options.device_ordinal);
  for (auto& slots : of_threads) slots.resize(options.slots);
}

// Stream, slots and copies in flight of one thread. Without a device, pieces have landed when land() returns.
struct RangeJob::Stage {
  explicit Stage(const RangeSlots& slots, std::vector<std::unique_ptr<PinnedBuffer>>& buffers)
      : options(slots.options), context(slots.context), buffers(buffers), events(buffers.size()),
        bytes(buffers.size()) {
    if (!context) return;
    current = std::make_unique<CurrentContext>(*context);
    try {
      const CudaDriver& driver = context->driver;
      driver.check(driver.cuStreamCreate(&stream, kCudaNonBlockingStream), "cuStreamCreate");
      for (CuEvent& event : events)
        driver.check(driver.cuEventCreate(&event, kCudaBlockingSync | kCudaNoTiming), "cuEventCreate");
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~Stage() { destroy(); }

  void destroy() {
    for (CuEvent event : events)
      if (event != nullptr) context->driver.cuEventDestroy(event);
    if (stream != nullptr) context->driver.cuStreamDestroy(stream);
  }

  uint8_t* slot(size_t number) {
    std::unique_ptr<PinnedBuffer>& buffer = buffers[number];
    if (!buffer) buffer = std::make_unique<PinnedBuffer>(context, options.piece_bytes);
    return buffer->data();
  }

  void copy(uint64_t target, const uint8_t* source, const Part& part) const {
    const CudaDriver& driver = context->driver;
    if (part.rows == 1) {
      driver.check(driver.cuMemcpyHtoDAsync(target, source, part.row_bytes, stream), "cuMemcpyHtoDAsync");
      return;
    }
    if (part.source_pitch >= kPitchMax || part.target_pitch >= kPitchMax) {
      for (uint64_t row = 0; row < part.rows; row++)
        driver.check(driver.cuMemcpyHtoDAsync(target + row * part.target_pitch, source + row * part.source_pitch,
                                              part.row_bytes, stream),
                     "cuMemcpyHtoDAsync");
      return;
    }
    CuMemcpy2D rows{};
    rows.source_type = kCudaHostMemory;
    rows.source_host = source;
    rows.source_pitch = part.source_pitch;
    rows.target_type = kCudaDeviceMemory;
    rows.target_device = target;
    rows.target_pitch = part.target_pitch;
    rows.width_bytes = part.row_bytes;
    rows.height = part.rows;
    driver.check(driver.cuMemcpy2DAsync(&rows, stream), "cuMemcpy2DAsync");
  }

  void record(size_t slot, uint64_t n_bytes) {
    context->driver.check(context->driver.cuEventRecord(events[slot], stream), "cuEventRecord");
    bytes[slot] = n_bytes;
    in_flight++;
  }

  // Waits for the copies of a slot; returns their bytes.
  uint64_t finish(size_t slot) {
    context->driver.check(context->driver.cuEventSynchronize(events[slot]), "cuEventSynchronize");
    in_flight--;
    return std::exchange(bytes[slot], 0);
  }

  // After a failed call a copy may still be in flight. If its end cannot be awaited, the slots are never used again.
  void settle() {
    if (context && stream != nullptr && context->driver.cuStreamSynchronize(stream) != 0)
      for (auto& buffer : buffers)
        if (buffer) {
          buffer->abandon();
          buffer.reset();
        }
  }

  const RangeOptions& options;
  const std::shared_ptr<PrimaryContext> context;
  std::vector<std::unique_ptr<PinnedBuffer>>& buffers;
  std::unique_ptr<CurrentContext> current;
  CuStream stream = nullptr;
  std::vector<CuEvent> events;
  std::vector<uint64_t> bytes;  // of a slot's copies in flight
  size_t in_flight = 0;
};

RangeJob::RangeJob(std::shared_ptr<RangeSlots> slots, RangePlan plan, std::vector<RangeTarget> targets)
    : slots_(std::move(slots)), plan_(std::move(plan)), targets_(std::move(targets)),
      sum_(best_instruction_set().sum), seed_(slab_seed(reinterpret_cast<const uint8_t*>("kvtier weights\0"), 0, 0)) {
  for (const RangeFile& file : plan_.files()) {
    fds_.push_back(fcntl(static_cast<int>(file.fd), F_DUPFD_CLOEXEC, 0));
    if (fds_.back() < 0) throw std::system_error(errno, std::generic_category());
  }
}

RangeJob::~RangeJob() {
  for (int fd : fds_)
    if (fd >= 0) ::close(fd);
}

void RangeJob::start() {
  const size_t threads = std::min<size_t>(slots_->options.threads, plan_.pieces().size());
  try {
    for (uint32_t i = 0; i < threads; i++) {
      std::lock_guard<std::mutex> lock(mutex_);
      std::thread([job = shared_from_this(), i] { job->work(i); }).detach();
      threads_alive_++;
    }
  } catch (...) {
    cancel();
    throw;
  }
}

bool RangeJob::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return threads_alive_ == 0; });
}

void RangeJob::cancel() {
  stop_ = true;
  std::unique_lock<std::mutex> lock(mutex_);
  cancelled_ = true;
  changed_.wait(lock, [this] { return landing_ == 0; });
}

RangeFailure RangeJob::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void RangeJob::work(uint32_t thread) {
  become_worker();
  try {
    Stage stage(*slots_, slots_->of_threads[thread]);
    try {
      move_pieces(stage);
    } catch (...) {
      stage.settle();
      for (; stage.in_flight > 0; stage.in_flight--) end_landing(0);
      throw;
    }
  } catch (const CudaFailed& failed) {
    fail({EREMOTEIO, 0, 0, failed.what()});
  } catch (const std::system_error& error) {
    fail({error.code().value(), 0, 0, "buffers"});
  } catch (const std::bad_alloc&) {
    fail({ENOMEM, 0, 0, "buffers"});
  }
  thread_ended();
}

void RangeJob::move_pieces(Stage& stage) {
  const size_t n_slots = stage.buffers.size();
  std::vector<Part> parts;
  size_t slot = 0;
  while (!stop_) {
    const size_t number = next_.fetch_add(1);
    if (number >= plan_.pieces().size()) break;
    const RangePiece& piece = plan_.pieces()[number];
    if (stage.in_flight == n_slots) end_landing(stage.finish(slot));
    uint8_t* data = stage.slot(slot);
    if (!read(piece, data)) break;
    if (!begin_landing()) break;
    uint64_t bytes = 0;
    try {
      if (plan_.files()[piece.file].sums != nullptr) sum(piece, data);
      plan_.parts_of(piece, parts);
      bytes = land(parts, data, stage);
      if (stage.context) stage.record(slot, bytes);
    } catch (...) {
      stage.settle();
      end_landing(0);
      throw;
    }
    if (!stage.context) end_landing(bytes);
    slot = (slot + 1) % n_slots;
  }
  for (size_t oldest = (slot + n_slots - stage.in_flight) % n_slots; stage.in_flight > 0;
       oldest = (oldest + 1) % n_slots)
    end_landing(stage.finish(oldest));
}

bool RangeJob::read(const RangePiece& piece, uint8_t* slot) {
  const uint64_t needed = piece.end - piece.start;
  const uint64_t pages = (needed + kPageBytes - 1) / kPageBytes * kPageBytes;
  const ReadResult result = read_at_least(fds_[piece.file], slot, needed, pages, static_cast<int64_t>(piece.start));
  if (result.error != 0) {
    fail({result.error, piece.file, piece.start + result.bytes, ""});
    return false;
  }
  read_.fetch_add(needed, std::memory_order_relaxed);
  return true;
}

// Of whole blocks, while the piece is in the cache. The last one is padded with zeros to whole pairs.
void RangeJob::sum(const RangePiece& piece, uint8_t* slot) const {
  const uint64_t block_bytes = slots_->options.block_bytes;
  const RangeFile& file = plan_.files()[piece.file];
  // A file that has grown may give more than there is room for.
  const uint64_t end = std::min(piece.end, static_cast<uint64_t>(file.size));
  for (uint64_t at = piece.start; at < end; at += block_bytes) {
    uint8_t* data = slot + (at - piece.start);
    const uint64_t bytes = std::min(block_bytes, end - at), padded = (bytes + 7) / 8 * 8;
    std::memset(data + bytes, 0, padded - bytes);
    file.sums[at / block_bytes] = sum_(data, padded, seed_, 0);
  }
}

uint64_t RangeJob::land(const std::vector<Part>& parts, const uint8_t* slot, Stage& stage) {
  uint64_t bytes = 0;
  for (const Part& part : parts) {
    const RangeTarget& target = targets_[static_cast<size_t>(part.target)];
    const uint64_t address = target.address + static_cast<uint64_t>(part.target_offset);
    const uint8_t* source = slot + part.from;
    bytes += part.bytes();
    if (target.address == 0) continue;
    if (target.on_device != 0) {
      stage.copy(address, source, part);
      continue;
    }
    for (uint64_t row = 0; row < part.rows; row++)
      std::memcpy(reinterpret_cast<uint8_t*>(address + row * part.target_pitch), source + row * part.source_pitch,
                  part.row_bytes);
  }
  return bytes;
}

bool RangeJob::begin_landing() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cancelled_) return false;
  landing_++;
  return true;
}

void RangeJob::end_landing(uint64_t bytes) {
  landed_.fetch_add(bytes, std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(mutex_);
  if (--landing_ == 0 && cancelled_) changed_.notify_all();
}

void RangeJob::fail(RangeFailure failure) {
  stop_ = true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.error == 0) failure_ = std::move(failure);
}

void RangeJob::thread_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--threads_alive_ == 0) changed_.notify_all();
}

}  // namespace kvtier
