// Checks of arguments.
#pragma once
#include <stdexcept>
#include <string>

namespace pdserve {

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

inline void require(bool holds, const std::string& message) { require(holds, message.c_str()); }

}  // namespace pdserve
