/* Answers of a CUDA runtime for the calls that FlashInfer's host-side planner makes, as an H100 would give them.
 * Preloaded by the planner tests on machines without a GPU; copies are plain memcpy and every launch fails. */
#include <stddef.h>
#include <string.h>

typedef int cuda_error;
enum { SUCCESS = 0, LAUNCH_FAILED = 999 };
enum { /* cudaDeviceAttr */
  MULTIPROCESSORS = 16,
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76,
  SHARED_PER_MULTIPROCESSOR = 81,
  SHARED_PER_BLOCK_OPTIN = 97
};

cuda_error cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case MULTIPROCESSORS: *value = 132; break;
    case CAPABILITY_MAJOR: *value = 9; break;
    case CAPABILITY_MINOR: *value = 0; break;
    case SHARED_PER_MULTIPROCESSOR: *value = 228 * 1024; break;
    case SHARED_PER_BLOCK_OPTIN: *value = 227 * 1024; break;
    default: *value = 1;
  }
  return SUCCESS;
}

cuda_error cudaGetDevice(int* device) { *device = 0; return SUCCESS; }
cuda_error cudaSetDevice(int device) { (void)device; return SUCCESS; }

cuda_error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int threads,
                                                                  size_t shared, unsigned flags) {
  (void)kernel, (void)threads, (void)shared, (void)flags;
  *blocks = 4;
  return SUCCESS;
}

cuda_error cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return SUCCESS;
}

cuda_error cudaMemcpyAsync(void* target, const void* source, size_t n, int kind, void* stream) {
  (void)kind, (void)stream;
  memcpy(target, source, n);
  return SUCCESS;
}

const char* cudaGetErrorString(cuda_error error) { (void)error; return "stub of the CUDA runtime"; }
const char* cudaGetErrorName(cuda_error error) { (void)error; return "stub"; }

/* What compiled kernels call when their library is loaded. */
static void* module_handle[4];
void** __cudaRegisterFatBinary(void* image) { (void)image; return module_handle; }
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
cuda_error __cudaGetKernel(void** kernel, const void* function) { *kernel = (void*)function; return SUCCESS; }
cuda_error __cudaPopCallConfiguration(void* a, void* b, void* c, void* d) {
  (void)a, (void)b, (void)c, (void)d;
  return LAUNCH_FAILED;
}
cuda_error __cudaLaunchKernel(const void* kernel) { (void)kernel; return LAUNCH_FAILED; }
cuda_error cudaLaunchKernel(const void* kernel) { (void)kernel; return LAUNCH_FAILED; }
cuda_error cudaLaunchKernelExC(const void* config, const void* kernel, void** arguments) {
  (void)config, (void)kernel, (void)arguments;
  return LAUNCH_FAILED;
}
