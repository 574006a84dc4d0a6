// The tests by name; main.cpp runs them.
#pragma once

namespace pdserve {

void test_words();
void test_pool();
void test_linear();

}  // namespace pdserve
