// Files of a file system in memory, mapped: what is read there is copied once, and summed in the same pass.
//
// read(2) copies there, too, but slowly, and the sum then fetches the same bytes again. A mapping costs page faults the
// first time its bytes are read, and some work at its end, so it is kept as long as its file is in use. (Processor time
// of two busy cores of a Xeon with AVX-512, records of 4 MiB in pieces of 256 KiB: 530 us a record; 880 the first time,
// and 45 to unmap it; through a bounce buffer 1000, in place 980, fio's way without sums 800.) Not so on every machine:
// kvtier/io/memory_reads.py measures.
#pragma once
#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace kvtier {

// Address space; what has been read of it counts as shared memory of the process, with 2 MiB of page tables a GiB.
constexpr size_t kMappedBytesMax = size_t{32} << 30;
constexpr size_t kMappingsMax = 256;

// One file. It keeps the file's memory even when the file has no name any more.
class Mapping {
 public:
  // kToPin: CUDA registers only what may be written, too.
  enum Purpose { kToRead, kToPin };

  // Null where it cannot be: not in memory, empty, not ours to write (of such files the kernel does not tell what is in
  // memory), no room.
  static std::shared_ptr<const Mapping> make(int fd, const struct stat& file, Purpose purpose = kToRead);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  bool is_of(const struct stat& file) const { return file.st_dev == device_ && file.st_ino == inode_; }
  size_t bytes() const { return bytes_; }
  uint8_t* data() const { return data_; }

  // Where these bytes are. Null unless they are whole pages with memory behind them: to touch a hole would give it
  // memory. Nobody promises that it stays so: see BusGuard. pages: scratch.
  const uint8_t* find(int64_t offset, size_t bytes, std::vector<unsigned char>& pages) const;

 private:
  Mapping(uint8_t* data, size_t bytes, const struct stat& file);

  uint8_t* const data_;
  const size_t bytes_;
  const dev_t device_;
  const ino_t inode_;
};

// One engine's, by descriptor. Thread-safe; nothing is mapped or unmapped under the lock.
class Mappings {
 public:
  // Of the file that this descriptor stands for now, up to the byte before `end` at least; made if there is none. Null
  // where it is to be read the ordinary way. Whoever holds a mapping may use it; the last one who lets go unmaps it.
  std::shared_ptr<const Mapping> of(int fd, int64_t end);

  // What was mapped of it, or null: the descriptor is about to be closed.
  std::shared_ptr<const Mapping> take_out(int fd);

  // From now on nothing is mapped: SIGBUS is somebody else's.
  void stop() { stopped_.store(true, std::memory_order_relaxed); }
  bool has_stopped() const { return stopped_.load(std::memory_order_relaxed); }

  void clear();

 private:
  struct Entry {
    std::shared_ptr<const Mapping> mapping;
    uint64_t used = 0;
  };
  using Gone = std::vector<std::shared_ptr<const Mapping>>;

  void make_room(size_t bytes, Gone& gone);  // the least recently used go. Under mutex_
  void remove(int fd, Gone& gone);           // under mutex_

  std::mutex mutex_;
  std::unordered_map<int, Entry> by_fd_;
  size_t bytes_ = 0;
  uint64_t clock_ = 0;
  std::atomic<bool> stopped_{false};
};

}  // namespace kvtier
