#include "engine.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace kvtier {
namespace {

// While reads wait, one piece in this many is a write (on at most half the threads), so that saves proceed.
constexpr uint32_t kReadsPerWrite = 8;

// Batches searched for neighbours of a read: loads submit one batch a chunk, and those of several requests mix.
constexpr size_t kLookAhead = 32;

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options), sum_(best_instruction_set().sum) {}

std::shared_ptr<Engine> Engine::start(const EngineOptions& options) {
  std::shared_ptr<Engine> engine(new Engine(options));
  try {
    engine->add_threads(options.threads, false);
  } catch (...) {
    engine->close(std::chrono::seconds(1));
    throw;
  }
  return engine;
}

void Engine::add_threads(uint32_t n, bool stand_in) {
  std::vector<std::unique_ptr<DeviceStage>> stages(n);
  if (options_.has_device())
    stages = open_stages(options_.device_ordinal, n, options_.device_slots, options_.device_piece_bytes);
  for (std::unique_ptr<DeviceStage>& stage : stages) {
    auto gaps = std::make_unique<Gaps>();
    std::lock_guard<std::mutex> lock(mutex_);
    std::thread([engine = shared_from_this(), stage = std::move(stage), gaps = std::move(gaps), stand_in]() mutable {
      engine->work(std::move(stage), std::move(gaps), stand_in);
    }).detach();
    threads_alive_++;
    stand_ins_ += stand_in;
  }
}

void Engine::widen(std::chrono::nanoseconds hung_after) {
  const auto moved_before = std::chrono::steady_clock::now() - hung_after;
  std::unique_lock<std::mutex> lock(mutex_);
  if (stop_) return;
  uint32_t held = 0;
  for (auto& [fd, file] : files_) {
    if (file.threads > 0 && !file.hangs && file.moved < moved_before) {
      file.hangs = true;
      hung_files_++;
    }
    if (file.hangs) held += file.threads;
  }
  stand_ins_wanted_ = std::min(held, options_.threads);
  if (stand_ins_ > stand_ins_wanted_) work_or_stop_.notify_all();
  const uint32_t missing = stand_ins_wanted_ - std::min(stand_ins_wanted_, stand_ins_);
  lock.unlock();
  if (missing > 0) add_threads(missing, true);
}

int Engine::submit(const std::shared_ptr<Batch>& batch) {
  uint64_t pieces = 0;
  for (size_t i = 0; i < batch->size(); i++) {
    Op& op = batch->op(i);
    const uint64_t piece = piece_bytes(op);
    // A flush has no payload but is one piece.
    op.n_pieces = std::max<uint32_t>(1, static_cast<uint32_t>(round_up(op.payload_bytes(), piece) / piece));
    op.unfinished.store(op.n_pieces, std::memory_order_relaxed);
    pieces += op.n_pieces;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return ESHUTDOWN;
  if (queued_ops_ + batch->size() > options_.queued_ops_max) return EAGAIN;
  queued_ops_ += batch->size();
  for (int kind = 0; kind < kLanes; kind++)
    if (!batch->lane(kind).empty()) lanes_[kind].push_back(batch);
  // Wake no more threads than there are pieces: the others would only switch.
  for (uint64_t woken = 0; woken < std::min<uint64_t>(pieces, idle_); woken++) work_or_stop_.notify_one();
  return 0;
}

void Engine::cancel(const std::shared_ptr<Batch>& batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  drop_queued(*batch);
  for (auto& lane : lanes_)
    for (auto it = lane.begin(); it != lane.end();) it = *it == batch ? lane.erase(it) : it + 1;
}

void Engine::drop_queued(Batch& batch) {
  for (int kind = 0; kind < kLanes; kind++) {
    Lane& lane = batch.lane(kind);
    for (; !lane.empty(); lane.next++) {
      Op& op = batch.op(lane.ops[lane.next]);
      if (op.is_given_out()) continue;
      queued_ops_--;
      op.fail(ECANCELED);
      const uint32_t dropped = op.n_pieces - op.next_piece;
      op.next_piece = op.n_pieces;
      if (op.unfinished.fetch_sub(dropped, std::memory_order_acq_rel) == dropped) batch.op_done();
    }
  }
}

bool Engine::close(std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  stop_ = true;
  for (auto& lane : lanes_) {
    for (; !lane.empty(); lane.pop_front()) drop_queued(*lane.front());
  }
  work_or_stop_.notify_all();
  return thread_ended_.wait_until(lock, deadline, [this] { return threads_alive_ == 0; });
}

void Engine::work(std::unique_ptr<DeviceStage> stage, std::unique_ptr<Gaps> gaps, bool stand_in) {
  become_worker();
  if (stage) stage->enter();
  Writer writer;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ && !(stand_in && stand_ins_ > stand_ins_wanted_)) {
    const bool copying = stage && !stage->empty();
    const int kind = choose();
    if (kind < 0 && !copying) {
      idle_++;
      work_or_stop_.wait(lock);
      idle_--;
      continue;
    }
    if (copying && (kind < 0 || kind == kWrite || stage->full())) {
      // Without a free slot, leave the work to other threads. A read's result does not wait for a write.
      lock.unlock();
      report(stage->finish_oldest(), writer);
      lock.lock();
      continue;
    }
    Run run = take(kind);
    const int fd = run.fd();
    lock.unlock();
    // Copies that have ended are reported before this thread reads or writes something else.
    while (copying && !stage->empty() && stage->oldest_is_done()) report(stage->finish_oldest(), writer);
    perform(std::move(run), stage.get(), *gaps, writer);
    lock.lock();
    give_back(kind, fd);
  }
  stand_ins_ -= stand_in;
  lock.unlock();
  // Copies in flight end before their slots and their stream are freed.
  while (stage && !stage->empty()) report(stage->finish_oldest(), writer);
  stage.reset();
  lock.lock();
  if (--threads_alive_ == 0) thread_ended_.notify_all();
}

int Engine::choose() const {
  const bool reads = has_work(kRead), writes = has_work(kWrite);
  if (reads && writes) {
    const bool turn = reads_in_a_row_ >= kReadsPerWrite - 1;
    return turn && writing_ < stand_ins_ + (options_.threads + 1) / 2 ? kWrite : kRead;
  }
  if (reads) return kRead;
  // One thread does not write, so that an arriving read never waits for writes alone.
  const uint32_t writers_max = stand_ins_ + (options_.threads > 1 ? options_.threads - 1 : 1);
  return writes && writing_ < writers_max ? kWrite : -1;
}

Engine::Next Engine::find(int kind) const {
  const std::deque<std::shared_ptr<Batch>>& queue = lanes_[kind];
  Next next;
  uint32_t fewest = UINT32_MAX;
  size_t searched = 0;  // batches that do not wait for a file that hangs
  for (size_t i = 0; i < queue.size() && searched < kLookAhead && fewest > 0; i++) {
    const Lane& lane = queue[i]->lane(kind);
    bool waits = true;
    for (size_t k = lane.next; k < lane.ops.size() && fewest > 0; k++) {
      Op& op = queue[i]->op(lane.ops[k]);
      if (op.is_given_out()) continue;
      const auto found = files_.find(op.spec.fd);
      const InUse file = found == files_.end() ? InUse() : found->second;
      // A file that hangs gets a second thread if no other file waits, because a flush may take long where writes do
      // not; but never the last thread that is free.
      if (file.hangs && (file.threads > 1 || idle_ == 0)) continue;
      waits &= file.hangs;
      // Writes to one file exclude each other on most file systems: threads spread over the files that wait.
      const uint32_t threads = kind == kRead && !file.hangs ? 0 : file.threads;
      if (threads < fewest) {
        fewest = threads;
        next = {i, &op};
      }
    }
    searched += !waits;
  }
  return next;
}

Run Engine::take(int kind) {
  std::deque<std::shared_ptr<Batch>>& queue = lanes_[kind];
  const Next next = find(kind);
  const auto place = queue.begin() + static_cast<std::ptrdiff_t>(next.batch);
  const std::shared_ptr<Batch> batch = *place;
  Run run{{piece_of(*next.op)}};
  const bool whole = give_out(batch, kind, run.pieces.front());
  if (kind == kWrite) {
    if (batch->lane(kind).empty()) queue.erase(place);
    writing_++;
  } else if (whole) {
    // Batches take turns, an operation or a run each, so that adjacent pieces are read together.
    queue.erase(place);
    take_neighbours(run, batch, kind);
    if (!batch->lane(kind).empty()) queue.push_back(batch);
  }
  reads_in_a_row_ = kind == kWrite || lanes_[kWrite].empty() ? 0 : reads_in_a_row_ + 1;
  InUse& file = files_[run.fd()];
  if (file.threads++ == 0) file.moved = std::chrono::steady_clock::now();
  return run;
}

void Engine::give_back(int kind, int fd) {
  InUse& file = files_[fd];
  file.moved = std::chrono::steady_clock::now();
  if (std::exchange(file.hangs, false)) {
    hung_files_--;
    work_or_stop_.notify_all();
  }
  file.threads--;
  if (kind != kWrite) return;
  writing_--;
  if (!lanes_[kWrite].empty()) work_or_stop_.notify_one();
}

// A run of a piece's size has no room for neighbours. A neighbour is a whole operation: the first of several pieces
// would already have a piece's size.
void Engine::take_neighbours(Run& run, const std::shared_ptr<Batch>& batch, int kind) {
  const uint64_t bytes_max = piece_bytes(*run.pieces.front().op);
  const auto take_from = [&](const std::shared_ptr<Batch>& other) {
    for (Lane& lane = other->lane(kind); !lane.empty();) {
      const Piece next = piece_of(other->op(lane.ops[lane.next]));
      if (!run.may_take(next, bytes_max)) return;
      run.pieces.push_back(next);
      give_out(other, kind, run.pieces.back());
    }
  };
  take_from(batch);
  std::deque<std::shared_ptr<Batch>>& queue = lanes_[kind];
  for (size_t i = 0; i < std::min(queue.size(), kLookAhead) && run.bytes() < bytes_max;) {
    take_from(queue[i]);
    if (queue[i]->lane(kind).empty())
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i));
    else
      i++;
  }
}

Piece Engine::piece_of(Op& op) const {
  const uint64_t start = op.next_piece * piece_bytes(op);
  return {nullptr, &op, start, std::min(piece_bytes(op), op.payload_bytes() - start)};
}

bool Engine::give_out(const std::shared_ptr<Batch>& batch, int kind, Piece& piece) {
  piece.batch = batch;
  piece.op->next_piece++;
  if (!piece.op->is_given_out()) return false;
  Lane& lane = batch->lane(kind);
  while (!lane.empty() && batch->op(lane.ops[lane.next]).is_given_out()) lane.next++;
  queued_ops_--;
  return true;
}

uint64_t Engine::piece_bytes(const Op& op) const {
  if (op.on_device()) return options_.device_piece_bytes;
  return op.spec.kind == kRead ? options_.read_piece_bytes : options_.write_piece_bytes;
}

void Engine::perform(Run run, DeviceStage* stage, Gaps& gaps, Writer& writer) {
  if (run.is_wanted()) {
    // With copies in flight, the run is reported when they have ended.
    if (run.on_device() && stage->send(run)) return;
    if (!run.on_device()) run.kind() == kRead ? land(run, gaps) : store(run.pieces.front(), writer);
  }
  report(run, writer);
}

void Engine::report(const Run& run, Writer& writer) {
  for (const Piece& piece : run.pieces) piece_done(piece, writer);
}

void Engine::land(const Run& run, Gaps& gaps) {
  read_run(run, gaps);
  for (const Piece& piece : run.pieces)
    if (piece.op->error.load(std::memory_order_relaxed) == 0) sum(piece);
}

void Engine::store(const Piece& piece, Writer& writer) {
  Op& op = *piece.op;
  if (op.spec.kind == kFlush) {
    if (const int error = flush(op.spec.fd)) op.fail(error);
    return;
  }
  sum(piece);
  if (const int error = writer.write_fully(op.spec.fd, piece.memory(), piece.bytes, piece.offset())) op.fail(error);
}

void Engine::sum(const Piece& piece) {
  const OpSpec& spec = piece.op->spec;
  uint64_t start = piece.start, left = piece.bytes;
  while (left > 0) {
    const uint32_t slab = static_cast<uint32_t>(start / spec.slab_bytes);
    const uint64_t within = start % spec.slab_bytes;
    const uint64_t part = std::min(left, spec.slab_bytes - within);
    const uint64_t seed = slab_seed(spec.key, spec.first_head + slab, spec.first_layer);
    piece.batch->add_to_sum(piece.op->first_sum + slab, sum_(piece.op->slabs() + start, part, seed, within / 8));
    start += part;
    left -= part;
  }
}

void Engine::piece_done(const Piece& piece, Writer& writer) {
  Op& op = *piece.op;
  if (op.unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (op.spec.kind == kWrite && op.error.load() == 0 && !piece.batch->is_any_bad(op))
    write_header(*piece.batch, op, writer);
  piece.batch->op_done();
}

void Engine::write_header(Batch& batch, Op& op, Writer& writer) {
  uint8_t* page = reinterpret_cast<uint8_t*>(op.spec.address);
  for (uint32_t i = 0; i < op.spec.n_slabs; i++) {
    const uint64_t sum = batch.sum(op.first_sum + i);
    std::memcpy(page + kChecksumsOffset + 8 * i, &sum, 8);
  }
  std::memset(page + kCrcOffset, 0, 4);
  const uint32_t crc = crc32(page, kPageBytes);
  std::memcpy(page + kCrcOffset, &crc, 4);
  if (const int error = writer.write_fully(op.spec.fd, page, kPageBytes, op.spec.offset)) op.fail(error);
}

}  // namespace kvtier
