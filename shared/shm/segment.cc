// Segments on Linux: memfd_create, file seals, Boost.Interprocess mappings. A sealed memfd can
// neither shrink (a reader would get SIGBUS) nor grow, and the seals cannot be taken off; so a size
// that was checked once stays true.
#include "shared/shm/segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/interprocess/mapped_region.hpp>
#include <cerrno>

namespace lode {
namespace {

namespace ipc = boost::interprocess;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// What Boost.Interprocess calls a memory mappable: an fd that it does not own.
class MappableFd {
 public:
  explicit MappableFd(int fd) : fd_(fd) {}
  ipc::mapping_handle_t get_mapping_handle() const {
    return ipc::ipcdetail::mapping_handle_from_file_handle(fd_);
  }

 private:
  int fd_;
};

// An address range of `bytes` that starts on a huge page border, reserved but not usable; {nullptr,
// 0} when it cannot be had. The kernel makes huge pages of a memfd only where address and file
// offset agree modulo 2 MiB, and does not align by itself.
struct Reservation {
  uint8_t* whole = nullptr;
  size_t whole_bytes = 0;
  uint8_t* aligned = nullptr;
};
Reservation ReserveAligned(size_t bytes) {
  Reservation r;
  r.whole_bytes = bytes + Segment::kHugePageBytes;
  void* whole =
      mmap(nullptr, r.whole_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return {};
  r.whole = static_cast<uint8_t*>(whole);
  const uintptr_t at = reinterpret_cast<uintptr_t>(whole) + Segment::kHugePageBytes - 1;
  r.aligned = reinterpret_cast<uint8_t*>(at / Segment::kHugePageBytes * Segment::kHugePageBytes);
  return r;
}
// Gives back what the mapping at `aligned` does not cover.
void TrimReservation(const Reservation& r, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  uint8_t* const end = r.aligned + (bytes + page - 1) / page * page;
  if (r.aligned > r.whole) munmap(r.whole, static_cast<size_t>(r.aligned - r.whole));
  if (r.whole + r.whole_bytes > end)
    munmap(end, static_cast<size_t>(r.whole + r.whole_bytes - end));
}

// Boost throws; no exception leaves this function.
Status Map(int fd, const std::string& label, size_t bytes, ipc::mode_t mode,
           ipc::mapped_region* out) {
  const Reservation place =
      bytes >= Segment::kHugePageBytes ? ReserveAligned(bytes) : Reservation{};
  try {
    // MAP_FIXED replaces our own reservation and nothing else.
    ipc::mapped_region region = place.aligned != nullptr
                                    ? ipc::mapped_region(MappableFd(fd), mode, 0, bytes,
                                                         place.aligned, MAP_FIXED | MAP_SHARED)
                                    : ipc::mapped_region(MappableFd(fd), mode, 0, bytes);
    if (place.aligned != nullptr) TrimReservation(place, bytes);
    out->swap(region);
    return OkStatus();
  } catch (const ipc::interprocess_exception& e) {
    if (place.whole != nullptr) munmap(place.whole, place.whole_bytes);
    return ResourceExhausted(
        "cannot map segment '{}' of {} bytes: {}; check the address space and memory limits "
        "(ulimit -v, cgroup)",
        label, bytes, e.what());
  }
}

}  // namespace

struct Segment::Impl {
  Fd fd;
  std::string label;
  ipc::mapped_region region;
};

Segment::Segment() : impl_(std::make_unique<Impl>()) {}
Segment::~Segment() = default;

uint8_t* Segment::data() const { return static_cast<uint8_t*>(impl_->region.get_address()); }
size_t Segment::size() const { return impl_->region.get_size(); }
int Segment::fd() const { return impl_->fd.get(); }
const std::string& Segment::label() const { return impl_->label; }

StatusOr<std::unique_ptr<Segment>> Segment::Create(const std::string& label, size_t bytes,
                                                   Pages pages) {
  if (bytes == 0) return InvalidArgument("segment '{}' would have no bytes", label);
  unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (pages == Pages::kHugeTlb) {
    flags |= MFD_HUGETLB | MFD_HUGE_2MB;
    bytes = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  }
  std::unique_ptr<Segment> segment(new Segment());
  segment->impl_->label = label;
  segment->impl_->fd.Reset(memfd_create(("lode-" + label).c_str(), flags));
  const int fd = segment->fd();
  if (fd < 0) return ErrnoStatus(fmt::format("memfd_create for segment '{}'", label), errno);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    if (errno == EFBIG) {
      return ResourceExhausted(
          "segment '{}' needs {} bytes, which is more than the limit of file sizes (ulimit -f)",
          label, bytes);
    }
    return ErrnoStatus(fmt::format("cannot size segment '{}' to {} bytes", label, bytes), errno);
  }
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0)
    return ErrnoStatus(fmt::format("cannot seal segment '{}'", label), errno);
  LODE_RETURN_IF_ERROR(Map(fd, label, bytes, ipc::read_write, &segment->impl_->region));
  return segment;
}

StatusOr<std::unique_ptr<Segment>> Segment::Attach(Fd fd, const std::string& label,
                                                   size_t min_bytes, Access access) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) return InvalidArgument("fd for segment '{}' is no memfd", label);
  if ((seals & kSeals) != kSeals) {
    return InvalidArgument("segment '{}' is not sealed against shrinking and growing (seals {:#x})",
                           label, seals);
  }
  // A writable mapping of a write-sealed memfd would fail later, with a message that explains less.
  if (access == Access::kReadWrite && (seals & F_SEAL_WRITE) != 0) {
    return InvalidArgument(
        "segment '{}' is sealed against writing, and this process must write to it", label);
  }
  struct stat info = {};
  if (fstat(fd.get(), &info) != 0)
    return ErrnoStatus(fmt::format("fstat of segment '{}'", label), errno);
  const size_t bytes = static_cast<size_t>(info.st_size);
  if (bytes == 0 || bytes < min_bytes) {
    return InvalidArgument(
        "segment '{}' has {} bytes, {} are needed: the two processes disagree about its shape",
        label, bytes, min_bytes);
  }
  std::unique_ptr<Segment> segment(new Segment());
  segment->impl_->label = label;
  segment->impl_->fd = std::move(fd);
  const ipc::mode_t mode = access == Access::kReadWrite ? ipc::read_write : ipc::read_only;
  LODE_RETURN_IF_ERROR(Map(segment->fd(), label, bytes, mode, &segment->impl_->region));
  return segment;
}

}  // namespace lode
