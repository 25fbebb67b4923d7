# Google Benchmark: the system's (Debian: libbenchmark-dev), else 1.8.3 from its release archive. Apache-2.0.
find_package(benchmark QUIET)
if(NOT TARGET benchmark::benchmark_main)
  message(STATUS "Google Benchmark is not installed: fetching 1.8.3 (apt-get install libbenchmark-dev avoids this)")
  include(FetchContent)
  set(BENCHMARK_ENABLE_TESTING OFF CACHE BOOL "" FORCE)
  set(BENCHMARK_ENABLE_INSTALL OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(benchmark
    URL https://github.com/google/benchmark/archive/refs/tags/v1.8.3.tar.gz
    URL_HASH SHA256=6bc180a57d23d4d9515519f92b0c83d61b05b5bab188961f36ac7b06b0d9e9ce)
  FetchContent_MakeAvailable(benchmark)
endif()
