// Runs the tests named on the command line, or all, on every target that this machine supports.
// Exits with 1 if a check fails.
#include "dispatch/targets.h"
#include "check.h"

int main(int argc, char** argv) {
  struct Test {
    const char* name;
    void (*run)();
  };
  const Test tests[] = {
      {"words", pdserve::test_words},
      {"pool", pdserve::test_pool},
      {"linear", pdserve::test_linear},
      {"pack", pdserve::test_pack},
      {"elementwise", pdserve::test_elementwise},
      {"attention", pdserve::test_attention},
      {"sampling", pdserve::test_sampling},
      {"decoder", pdserve::test_decoder},
  };
  std::printf("targets:");
  for (const pdserve::Kernels* target : pdserve::targets()) std::printf(" %s", target->isa);
  std::printf("\n");
  int ran = 0;
  for (const Test& test : tests) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted |= !std::strcmp(argv[i], test.name);
    if (!wanted) continue;
    int before = failures;
    test.run();
    std::printf("%s: %s\n", test.name, failures == before ? "ok" : "FAILED");
    std::fflush(stdout);
    ++ran;
  }
  if (argc > 1 && ran != argc - 1) std::printf("no such test\n");
  return failures || ran != (argc > 1 ? argc - 1 : ran);
}
