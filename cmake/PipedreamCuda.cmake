# Decides whether the CUDA backend is built: PIPEDREAM_WITH_CUDA, and the target CUDA::cudart_static.
#
#   auto  when a working nvcc is found; a broken one, or one that refuses the host compiler, gives a
#         warning and a build without CUDA
#   on    required: an error otherwise
#   off   never looked for
#
# CUDACXX names another nvcc, CUDAHOSTCXX another host compiler for it. PIPEDREAM_CUDA_ARCHS in the environment
# names the GPUs that kernels are built for, as CMAKE_CUDA_ARCHITECTURES does: "75", "80 90", "native".
# The runtime is linked statically: the module loads, and runs, on a machine without a driver.
# Keep pybind11 and other heavy headers out of .cu files: compiled by nvcc they take minutes.
set(PIPEDREAM_WITH_CUDA OFF)
string(TOLOWER "${PIPEDREAM_CUDA}" pd_cuda)
if(NOT pd_cuda MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "PIPEDREAM_CUDA is '${PIPEDREAM_CUDA}'; it must be auto, on or off")
endif()
if(pd_cuda STREQUAL "off")
  return()
endif()

# Turing to Hopper as machine code; the newest also as PTX, which later devices compile when they load. A build
# directory that was given others by the environment goes back to these without it.
set(pd_archs "75-real;80-real;86-real;89-real;90")
if(DEFINED ENV{PIPEDREAM_CUDA_ARCHS} AND NOT "$ENV{PIPEDREAM_CUDA_ARCHS}" STREQUAL "")
  string(REGEX REPLACE "[ ,;]+" ";" pd_archs "$ENV{PIPEDREAM_CUDA_ARCHS}")
  foreach(pd_arch IN LISTS pd_archs)
    if(NOT pd_arch MATCHES "^([0-9]+[af]?(-real|-virtual)?|native|all|all-major)$")
      message(FATAL_ERROR "PIPEDREAM_CUDA_ARCHS has '${pd_arch}'; it takes compute capabilities without the dot, as "
                          "in \"80 90\", or native")
    endif()
  endforeach()
  set(pd_archs_given "${pd_archs}")
endif()
if(pd_archs_given OR NOT CMAKE_CUDA_ARCHITECTURES OR CMAKE_CUDA_ARCHITECTURES STREQUAL PIPEDREAM_CUDA_ARCHS_GIVEN)
  set(CMAKE_CUDA_ARCHITECTURES "${pd_archs}" CACHE STRING "CUDA architectures" FORCE)
endif()
set(PIPEDREAM_CUDA_ARCHS_GIVEN "${pd_archs_given}" CACHE INTERNAL "What the environment named")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

# The toolkit's default place is often not on PATH. Asked again at each configure until it works: the
# toolkit may have been installed since.
if(NOT DEFINED ENV{CUDACXX})
  unset(PIPEDREAM_NVCC CACHE)
  find_program(PIPEDREAM_NVCC nvcc PATHS /usr/local/cuda/bin)
  mark_as_advanced(PIPEDREAM_NVCC)
  if(PIPEDREAM_NVCC)
    set(ENV{CUDACXX} ${PIPEDREAM_NVCC})
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()

# check_language tries the compiler in a project of its own, so a failure is an answer, not an error.
include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(TARGET CUDA::cudart_static)
    set(PIPEDREAM_WITH_CUDA ON)
    message(STATUS
            "CUDA ${CUDAToolkit_VERSION}: ${CMAKE_CUDA_COMPILER}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
    return()
  endif()
  set(pd_why "the toolkit of ${CMAKE_CUDA_COMPILER} has no static runtime (libcudart_static.a)")
elseif(DEFINED ENV{CUDACXX})
  # Once more by hand, for its own words.
  file(WRITE ${PROJECT_BINARY_DIR}/CMakeFiles/pd_try.cu "int main() { return 0; }\n")
  set(pd_try $ENV{CUDACXX} -c ${PROJECT_BINARY_DIR}/CMakeFiles/pd_try.cu
             -o ${PROJECT_BINARY_DIR}/CMakeFiles/pd_try.o)
  if(DEFINED ENV{CUDAHOSTCXX})
    list(APPEND pd_try -ccbin $ENV{CUDAHOSTCXX})
  endif()
  execute_process(COMMAND ${pd_try} OUTPUT_VARIABLE pd_said ERROR_VARIABLE pd_said)
  string(STRIP "${pd_said}" pd_said)
  set(pd_why "$ENV{CUDACXX} does not work here: ${pd_said}")
else()
  set(pd_why "no nvcc found")
endif()

if(pd_cuda STREQUAL "on")
  message(FATAL_ERROR "PIPEDREAM_CUDA=on, but ${pd_why}. Install the CUDA toolkit, or name a compiler with "
                      "CUDACXX and a host compiler that it takes with CUDAHOSTCXX, or use PIPEDREAM_CUDA=off")
elseif(DEFINED ENV{CUDACXX})
  message(WARNING "building without CUDA: ${pd_why}. PIPEDREAM_CUDA=off silences this")
else()
  message(STATUS "building without CUDA: ${pd_why}")
endif()
