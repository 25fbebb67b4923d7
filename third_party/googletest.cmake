# GoogleTest: the system's (Debian: libgtest-dev), else 1.14.0 from its release archive. BSD-3-Clause.
find_package(GTest QUIET)
if(NOT TARGET GTest::gtest_main)
  message(STATUS "GoogleTest is not installed: fetching 1.14.0 (apt-get install libgtest-dev avoids this)")
  include(FetchContent)
  set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
  set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(googletest
    URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
    URL_HASH SHA256=8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
  FetchContent_MakeAvailable(googletest)
endif()
