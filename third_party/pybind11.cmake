# pybind11 >= 2.12 from the pip package of the Python that the module is built for. BSD-3-Clause.
# Name the interpreter with -DPython_EXECUTABLE=...
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT pybind11_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 2.12 CONFIG QUIET)
if(NOT pybind11_FOUND)
  message(FATAL_ERROR "pybind11 >= 2.12 is not installed for ${Python_EXECUTABLE}; run "
                      "'${Python_EXECUTABLE} -m pip install pybind11', or configure with PIPEDREAM_BUILD_PYTHON=OFF")
endif()
