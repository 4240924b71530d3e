// A device whose memory no instruction of the CPU may touch: who takes its address for memory is killed by SIGSEGV.
//
// The same pages are mapped twice: without any access, which is what tensors have, and for this file alone. Operators
// that are not here run on copies on the CPU, so that results are those of the CPU, bit for bit.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr auto FAR = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(FAR, 0);
constexpr size_t ARENA = size_t{1} << 30, PAGE = 4096;

std::mutex lock;
char *forbidden = nullptr, *allowed = nullptr;
size_t top = 0;
std::map<size_t, size_t> used;        // offset → size
std::multimap<size_t, size_t> freed;  // size → offset
std::map<const char*, size_t> pinned; // CPU memory from which copies are counted
std::atomic<size_t> from_pinned = 0;

void map_arena() {
  int fd = memfd_create("far", 0);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, ARENA) == 0, "no memory file");
  allowed = static_cast<char*>(mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  forbidden = static_cast<char*>(mmap(nullptr, ARENA, PROT_NONE, MAP_SHARED, fd, 0));
  TORCH_CHECK(allowed != MAP_FAILED && forbidden != MAP_FAILED, "no memory");
  close(fd);
}

char* allowed_at(const void* address) { return allowed + (static_cast<const char*>(address) - forbidden); }

void give_back(void* address) {
  if (address == nullptr) return;
  std::lock_guard<std::mutex> held(lock);
  auto found = used.find(static_cast<char*>(address) - forbidden);
  std::memset(allowed + found->first, 0xA5, found->second);  // who uses it still has garbage
  freed.emplace(found->second, found->first);
  used.erase(found);
}

struct FarMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &give_back, DEVICE};
    std::lock_guard<std::mutex> held(lock);
    if (forbidden == nullptr) map_arena();
    nbytes = (nbytes + PAGE - 1) / PAGE * PAGE;
    size_t offset = top;
    if (auto found = freed.find(nbytes); found != freed.end()) {
      offset = found->second;
      freed.erase(found);
    } else {
      TORCH_CHECK(top + nbytes <= ARENA, "the device is full");
      top += nbytes;
    }
    used[offset] = nbytes;
    return {forbidden + offset, forbidden + offset, &give_back, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(allowed_at(to), allowed_at(from), nbytes);
  }
};
FarMemory far_memory;
REGISTER_ALLOCATOR(FAR, &far_memory);

void unpin(void* address) {
  std::lock_guard<std::mutex> held(lock);
  pinned.erase(static_cast<char*>(address));
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard<std::mutex> held(lock);
    auto* address = static_cast<char*>(std::aligned_alloc(64, (nbytes / 64 + 1) * 64));
    pinned[address] = nbytes;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  auto found = pinned.upper_bound(static_cast<const char*>(address));
  return found != pinned.begin() && (--found, address < found->first + found->second);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return FAR; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A tensor of the CPU over the same memory.
at::Tensor near(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const auto& storage = tensor.storage();
  void* address = storage.nbytes() ? allowed_at(storage.data()) : nullptr;
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                         c10::DataPtr(address, c10::Device(c10::kCPU)), nullptr, false)),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
  return made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.is_cpu() && from.numel() && is_pinned(from.const_data_ptr())) from_pinned += to.nbytes();
  at::AutoDispatchBelowADInplaceOrView guard;
  near(to).copy_(near(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &far_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &far_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (tensor.sizes() == size) return tensor;  // strides stay
  auto nbytes = at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), tensor.storage_offset());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (nbytes > storage->nbytes()) {
    auto grown = far_memory.allocate(nbytes);
    if (storage->nbytes()) std::memcpy(allowed_at(grown.get()), allowed_at(storage->data()), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(grown));
    storage->set_nbytes(nbytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

at::Scalar item(const at::Tensor& tensor) { return near(tensor).item(); }

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) { return at::cpu::view_symint(tensor, size); }

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::_reshape_alias_symint(tensor, size, stride);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(tensor, std::move(storage), std::move(offset), size, stride);
}

void on_the_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("as_strided", &as_strided);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("view", &view);
}

}  // namespace

extern "C" {
void far_init() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
size_t far_from_pinned_bytes() { return from_pinned; }
}
