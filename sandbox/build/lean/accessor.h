// Tensors indexed element by element: on the host (accessor) and, by value, in kernels (packed_accessor32 and 64).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SANDBOX_LEAN_HD __host__ __device__
#else
#define SANDBOX_LEAN_HD
#endif

namespace sandbox_lean {

template <typename T>
struct DefaultPtrTraits { using PtrType = T*; };
template <typename T>
struct RestrictPtrTraits { using PtrType = T* __restrict__; };

template <typename T, size_t N, template <typename> class Traits = DefaultPtrTraits, typename Index = int64_t>
class TensorAccessor {
 public:
  using PtrType = typename Traits<T>::PtrType;
  SANDBOX_LEAN_HD TensorAccessor(PtrType data, const Index* sizes, const Index* strides)
      : data_(data), sizes_(sizes), strides_(strides) {}
  SANDBOX_LEAN_HD Index size(Index dimension) const { return sizes_[dimension]; }
  SANDBOX_LEAN_HD Index stride(Index dimension) const { return strides_[dimension]; }
  SANDBOX_LEAN_HD PtrType data() const { return data_; }
  SANDBOX_LEAN_HD decltype(auto) operator[](Index index) const {
    if constexpr (N == 1) {
      return (data_[strides_[0] * index]);
    } else {
      return TensorAccessor<T, N - 1, Traits, Index>(data_ + strides_[0] * index, sizes_ + 1, strides_ + 1);
    }
  }

 private:
  PtrType data_;
  const Index* sizes_;
  const Index* strides_;
};

template <typename T, size_t N, template <typename> class Traits = DefaultPtrTraits, typename Index = int64_t>
class GenericPackedTensorAccessor {
 public:
  using PtrType = typename Traits<T>::PtrType;
  GenericPackedTensorAccessor(PtrType data, const int64_t* sizes, const int64_t* strides) : data_(data) {
    for (size_t k = 0; k < N; ++k) {
      sizes_[k] = static_cast<Index>(sizes[k]);
      strides_[k] = static_cast<Index>(strides[k]);
    }
  }
  SANDBOX_LEAN_HD Index size(Index dimension) const { return sizes_[dimension]; }
  SANDBOX_LEAN_HD Index stride(Index dimension) const { return strides_[dimension]; }
  SANDBOX_LEAN_HD PtrType data() const { return data_; }
  SANDBOX_LEAN_HD decltype(auto) operator[](Index index) const {
    return TensorAccessor<T, N, Traits, Index>(data_, sizes_, strides_)[index];
  }

 private:
  PtrType data_;
  Index sizes_[N];
  Index strides_[N];
};
template <typename T, size_t N, template <typename> class Traits = DefaultPtrTraits>
using PackedTensorAccessor32 = GenericPackedTensorAccessor<T, N, Traits, int32_t>;
template <typename T, size_t N, template <typename> class Traits = DefaultPtrTraits>
using PackedTensorAccessor64 = GenericPackedTensorAccessor<T, N, Traits, int64_t>;

}  // namespace sandbox_lean
