// The tests by name; main.cpp runs them.
#pragma once

namespace pdserve {

void test_words();
void test_pool();
void test_linear();
void test_pack();
void test_elementwise();
void test_attention();
void test_sampling();
void test_decoder();

}  // namespace pdserve
