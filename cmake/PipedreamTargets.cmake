# How every target of this project is made: warnings, sanitizers, one library per folder, one test
# executable per folder.
#
# Sources are globbed with CONFIGURE_DEPENDS: the tree says what a folder consists of, and a new file is
# picked up by the next build.

# ccache gives back what it has compiled before, and best without precompiled headers.
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
  set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)
endif()

# pd_options: what our own code is compiled with; third-party code does not see it.
add_library(pd_options INTERFACE)
target_include_directories(pd_options INTERFACE ${PROJECT_SOURCE_DIR}/csrc)
target_compile_options(pd_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow>)
if(PIPEDREAM_WARNINGS_AS_ERRORS)
  target_compile_options(pd_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  # gcc gives these by what it has inlined, also where libstdc++'s own strings are right (its bugs 105329, 105651):
  # whether they come depends on the version of gcc and on precompiled headers.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(pd_options INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=array-bounds;-Wno-error=restrict;-Wno-error=stringop-overflow>)
  endif()
endif()
if(PIPEDREAM_SANITIZE)
  # Everything below this line is instrumented, GoogleTest included when it is built from source.
  add_compile_options(-fsanitize=${PIPEDREAM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${PIPEDREAM_SANITIZE})
  # gcc does not model atomic_thread_fence under TSAN and says so; we use no fences, libstdc++ does.
  if(PIPEDREAM_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(pd_options INTERFACE -Wno-tsan)
  endif()
endif()

# What most of csrc/ includes.
set(PIPEDREAM_CORE_HEADERS
  <algorithm> <array> <atomic> <chrono> <cstddef> <cstdint> <cstring> <functional> <limits> <map> <memory> <mutex>
  <optional> <span> <string> <string_view> <thread> <tuple> <utility> <vector>)

# pd_precompile(<target> <first> <header>...): the headers are compiled once, for <first>, and read by all targets
# whose flags are the same.
function(pd_precompile target first)
  if(CMAKE_DISABLE_PRECOMPILE_HEADERS)
    return() # REUSE_FROM would warn for every target
  endif()
  if(target STREQUAL first)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ${first})
  endif()
endfunction()

# pd_add_folder(<folder> [LINKS <folder>...] [EXTRA <target>...] [EXCLUDE <regex>])
# The sources of the calling csrc/<folder>/ as static library pd_<folder>, alias pipedream::<folder>.
# Without any source it is an interface library. A source whose path matches EXCLUDE is left out.
function(pd_add_folder folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "EXCLUDE" "LINKS;EXTRA")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  if(arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX ${arg_EXCLUDE})
  endif()
  set(links ${arg_LINKS})
  list(TRANSFORM links PREPEND pipedream::)
  if(sources)
    add_library(pd_${folder} STATIC ${sources})
    target_link_libraries(pd_${folder} PUBLIC pd_options ${links} ${arg_EXTRA})
    pd_precompile(pd_${folder} pd_base ${PIPEDREAM_CORE_HEADERS})
  else()
    add_library(pd_${folder} INTERFACE)
    target_link_libraries(pd_${folder} INTERFACE pd_options ${links} ${arg_EXTRA})
  endif()
  add_library(pipedream::${folder} ALIAS pd_${folder})
endfunction()

# pd_add_tests(<folder> <target>...): tests/cpp/<folder>/*.cc as one executable pd_<folder>_test, linked with
# the targets. ctest runs it in shards, each with some of its tests: a process per test costs more than the tests.
function(pd_add_tests folder)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cc)
  if(NOT sources)
    return()
  endif()
  add_executable(pd_${folder}_test ${sources})
  target_include_directories(pd_${folder}_test PRIVATE ${PROJECT_SOURCE_DIR}/tests/cpp)
  target_link_libraries(pd_${folder}_test PRIVATE ${ARGN} pd_own_shard GTest::gtest GTest::gtest_main)
  if(TARGET pd_cuda_stub AND pipedream::device IN_LIST ARGN)
    target_link_libraries(pd_${folder}_test PRIVATE pd_cuda_stub)
  endif()
  # Optimising tests, and describing them to a debugger, would double what it takes to compile them. A sanitizer
  # names lines.
  if(NOT PIPEDREAM_SANITIZE)
    target_compile_options(pd_${folder}_test PRIVATE -Og -g0)
  endif()
  pd_precompile(pd_${folder}_test pd_base_test ${PIPEDREAM_TEST_HEADERS})
  if(PIPEDREAM_UNITY)
    set_target_properties(pd_${folder}_test PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
  # The timeout ends a deadlock; it judges no speed.
  math(EXPR last_shard "${PIPEDREAM_TEST_SHARDS} - 1")
  foreach(shard RANGE ${last_shard})
    add_test(NAME ${folder}/${shard} COMMAND pd_${folder}_test)
    set_tests_properties(${folder}/${shard} PROPERTIES TIMEOUT 900 LABELS ${folder}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${PIPEDREAM_TEST_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()

# pd_add_cuda_folder(<folder> [LINKS <folder>...] [EXTRA <target>...])
# As pd_add_folder, for a folder whose cuda/ needs the CUDA toolkit: cuda/*.cu and cuda/cuda_*.cc with it,
# cuda/no_cuda.cc without. No contraction: the device computes what the host does, to the bit.
function(pd_add_cuda_folder folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINKS;EXTRA")
  if(NOT PIPEDREAM_WITH_CUDA)
    pd_add_folder(${folder} LINKS ${arg_LINKS} EXCLUDE "cuda/cuda_.*.cc$" EXTRA ${arg_EXTRA})
    return()
  endif()
  pd_add_folder(${folder} LINKS ${arg_LINKS} EXCLUDE "cuda/no_cuda.cc$" EXTRA CUDA::cudart_static ${arg_EXTRA})
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu)
  target_sources(pd_${folder} PRIVATE ${cuda_sources})
  target_compile_options(pd_${folder} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>")
  if(PIPEDREAM_WARNINGS_AS_ERRORS)
    target_compile_options(pd_${folder} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Werror>")
  endif()
endfunction()

# pd_vectorise(<name>): <name>_baseline.cc and <name>_avx2.cc of the calling folder are vectorised in every
# build type; one source per instruction set, chosen at run time, so that a build for any processor is fast on
# this one. No contraction: all give the same bits. Exceptions and errno of the floating-point unit would stop
# the vectoriser, and nobody reads them. A macro: source properties belong to the calling folder.
macro(pd_vectorise name)
  set_source_files_properties(${name}_baseline.cc ${name}_avx2.cc PROPERTIES
    COMPILE_OPTIONS "-O3;-ffp-contract=off;-fno-math-errno;-fno-trapping-math" SKIP_PRECOMPILE_HEADERS ON)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-mavx2 PIPEDREAM_HAS_MAVX2)
  if(PIPEDREAM_HAS_MAVX2 AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set_property(SOURCE ${name}_avx2.cc APPEND PROPERTY COMPILE_OPTIONS -mavx2)
  endif()
endmacro()
