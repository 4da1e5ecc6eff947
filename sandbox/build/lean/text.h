// A text that grows, with the output operators of a stream: in the place of the standard library's strings and streams, whose
// headers take nvcc longer than all else, where a source does not use them itself (sandbox/build/lean_road.py).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace sandbox_lean {

class Text {
 public:
  Text() = default;
  Text(Text&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() { std::free(data_); }
  const char* c_str() const { return data_ ? data_ : ""; }
  void append(const char* text, size_t count) {
    char* grown = static_cast<char*>(std::realloc(data_, size_ + count + 1));
    if (!grown) return;
    data_ = grown;
    std::memcpy(data_ + size_, text, count);
    data_[size_ += count] = '\0';
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

inline Text& operator<<(Text& out, const char* text) {
  out.append(text, std::strlen(text));
  return out;
}
inline Text& operator<<(Text& out, char one) {
  out.append(&one, 1);
  return out;
}
template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T> && !std::is_same_v<T, char>>>
Text& operator<<(Text& out, T number) {
  char digits[64];
  if constexpr (std::is_floating_point_v<T>) {
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(number));
  } else if constexpr (std::is_same_v<T, signed char> || std::is_same_v<T, unsigned char>) {
    return out << static_cast<char>(number);
  } else if constexpr (std::is_signed_v<T>) {
    std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(number));
  } else {
    std::snprintf(digits, sizeof digits, "%llu", static_cast<unsigned long long>(number));
  }
  return out << static_cast<const char*>(digits);
}

}  // namespace sandbox_lean
