# Decides whether the CUDA backend is built: PIPEDREAM_WITH_CUDA, and the target CUDA::cudart_static.
#
#   auto  when a working nvcc is found; a broken one, or one that refuses the host compiler, gives a
#         warning and a build without CUDA
#   on    required: an error otherwise
#   off   never looked for
#
# CUDACXX names another nvcc, CUDAHOSTCXX another host compiler for it.
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

# Ampere to Hopper as machine code; the newest also as PTX, which later devices compile when they load.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "CUDA architectures")
endif()
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
