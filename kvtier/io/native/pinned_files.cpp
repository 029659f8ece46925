#include "pinned_files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "batch.h"

namespace kvtier {
namespace {

bool is_in_memory(int fd) {
  struct statfs system;
  if (fstatfs(fd, &system) != 0) return false;
  return system.f_type == TMPFS_MAGIC || static_cast<unsigned long>(system.f_type) == RAMFS_MAGIC;
}

}  // namespace

std::shared_ptr<const Mapping> Mapping::make(int fd, const struct stat& file) {
  if (file.st_size <= 0 || !S_ISREG(file.st_mode) || !is_in_memory(fd)) return nullptr;
  const size_t bytes = static_cast<size_t>(file.st_size);
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);  // EACCES if fd is read-only
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_DONTFORK);  // a child would keep the file's memory
  madvise(data, bytes, MADV_DONTDUMP);
  return std::shared_ptr<const Mapping>(new Mapping(static_cast<uint8_t*>(data), bytes, file));
}

Mapping::Mapping(uint8_t* data, size_t bytes, const struct stat& file)
    : data_(data), bytes_(bytes), device_(file.st_dev), inode_(file.st_ino) {}

Mapping::~Mapping() { munmap(data_, bytes_); }

class PinnedFile::Part {
 public:
  Part(std::shared_ptr<PrimaryContext> context, std::shared_ptr<const Mapping> mapping, int64_t start, int64_t end)
      : mapping_(std::move(mapping)),
        end_(end),
        range_(std::move(context), mapping_->data() + start, static_cast<size_t>(end - start)) {}

  ~Part() {
    try {
      range_.release();
    } catch (const CudaFailed&) {
      // Still registered: a later mapping at this address could not be registered, so keep this one.
      new std::shared_ptr<const Mapping>(mapping_);
    }
  }

  int64_t end() const { return end_; }

 private:
  const std::shared_ptr<const Mapping> mapping_;
  const int64_t end_;
  PinnedRange range_;
};

PinnedFile::PinnedFile(std::shared_ptr<const Mapping> mapping, Parts parts)
    : mapping_(std::move(mapping)), parts_(std::move(parts)) {}

int64_t PinnedFile::end() const { return parts_.empty() ? 0 : parts_.back()->end(); }

std::shared_ptr<const PinnedFile> PinnedFile::grown(const std::shared_ptr<PrimaryContext>& context,
                                                    int64_t end) const {
  Parts parts = parts_;
  parts.push_back(std::make_shared<const Part>(context, mapping_, this->end(), end));
  return std::make_shared<const PinnedFile>(mapping_, std::move(parts));
}

std::pair<const uint8_t*, uint64_t> PinnedFile::at(int64_t offset) const {
  const auto ends_before = [](int64_t at, const std::shared_ptr<const Part>& part) { return at < part->end(); };
  const auto part = std::upper_bound(parts_.begin(), parts_.end(), offset, ends_before);
  return {mapping_->data() + offset, static_cast<uint64_t>((*part)->end() - offset)};
}

void PinnedFiles::pin(int fd, int64_t end) {
  struct stat file;
  if (end <= 0 || end % static_cast<int64_t>(kPageBytes) != 0)
    throw std::system_error(EINVAL, std::generic_category());
  if (fstat(fd, &file) != 0) throw std::system_error(errno, std::generic_category());
  std::shared_ptr<const PinnedFile> known;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_fd_.find(fd);
    if (found != by_fd_.end() && found->second->is_of(file)) known = found->second;
  }
  if (!known) {
    auto mapping = Mapping::make(fd, file);
    if (!mapping) throw std::system_error(EINVAL, std::generic_category());
    known = std::make_shared<const PinnedFile>(std::move(mapping), PinnedFile::Parts{});
  }
  if (end <= known->end()) return;
  if (end > file.st_size || !known->has_room(end)) throw std::system_error(EINVAL, std::generic_category());
  auto grown = known->grown(std::make_shared<PrimaryContext>(ordinal_), end);
  std::lock_guard<std::mutex> lock(mutex_);
  by_fd_[fd].swap(grown);  // the former file is destroyed after the lock is released
}

std::shared_ptr<const PinnedFile> PinnedFiles::of(int fd, int64_t end) {
  std::shared_ptr<const PinnedFile> found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = by_fd_.find(fd);
    if (known == by_fd_.end() || known->second->end() < end) return nullptr;
    found = known->second;
  }
  struct stat file;
  return fstat(fd, &file) == 0 && found->is_of(file) && file.st_size >= end ? found : nullptr;
}

std::shared_ptr<const PinnedFile> PinnedFiles::take_out(int fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_fd_.extract(fd);
  return found ? found.mapped() : nullptr;
}

PinnedFiles::ByDescriptor PinnedFiles::take_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(by_fd_, {});
}

}  // namespace kvtier
