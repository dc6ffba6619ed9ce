// What torch, Inductor and flowrun ask of cuBLAS, of the driver and of NVML: that they are there.
// Products do nothing, as kernels do (cuda.cpp).

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if defined DRIVER
#include <sys/mman.h>
#endif

#define DOES_NOTHING(name) \
  int name() { return 0; }
#define MAKES(name) \
  int name(void** made) { return (*made = std::malloc(64)) == nullptr; }

// They load code when it is asked for, whatever CUDA_MODULE_LOADING says.
#define LOADS(name) \
  int name() { return hollow_load((void*)name, true), 0; }

extern "C" {
void hollow_load(const void* code, bool lazily);

#ifdef BLAS
MAKES(cublasCreate_v2)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixLayoutCreate)
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* found, int* count) {
  std::memset(found, 0, 64);
  *count = 1;
  return 0;
}
DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
LOADS(cublasGemmEx)
LOADS(cublasGemmStridedBatchedEx)
LOADS(cublasSgemm_v2)
LOADS(cublasDgemm_v2)
LOADS(cublasSgemmEx)
LOADS(cublasSgemmStridedBatched)
LOADS(cublasDgemmStridedBatched)
LOADS(cublasSgemv_v2)
LOADS(cublasSdot_v2)
LOADS(cublasDotEx)
LOADS(cublasLtMatmul)
DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutDestroy)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)
#endif

#ifdef DRIVER
const int NOT_FOUND = 500;
int cuGetExportTable(const void** table, const void*) { return *table = nullptr, NOT_FOUND; }
DOES_NOTHING(cuInit)
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGet(int* device, int number) { return *device = number, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 1:
      *value = 1024;
      break;  // threads of a block
    case 8:
      *value = 48 << 10;
      break;  // shared memory of a block
    case 10:
      *value = 32;
      break;  // threads of a warp
    case 12:
    case 82:
      *value = 65536;
      break;  // registers
    case 16:
      *value = 132;
      break;  // multiprocessors
    case 39:
      *value = 2048;
      break;  // threads of one
    case 75:
      *value = 9;
      break;  // compute capability
    case 76:
      *value = 0;
      break;
    case 97:
      *value = 227 << 10;
      break;  // shared memory that may be asked for
    default:
      *value = 1;
  }
  return 0;
}
int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
int cuCtxGetDevice(int* device) { return *device = 0; }
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxPushCurrent)
DOES_NOTHING(cuCtxPopCurrent)
DOES_NOTHING(cuCtxSetLimit)
int cuCtxGetLimit(size_t* value, int) { return *value = 1 << 20, 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)1, 0; }
int cuFuncGetAttribute(int* value, int attribute, void*) {
  return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, 0;
}
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
int cuGetErrorString(int, const char** text) { return *text = "a hollow GPU", 0; }
int cuGetErrorName(int, const char** text) { return *text = "a hollow GPU", 0; }
MAKES(cuModuleLoad)
int cuModuleLoadData(void** made, const void*) {
  *made = std::malloc(64);
  return hollow_load(*made, true), 0;
}
MAKES(cuModuleLoadDataEx)
MAKES(cuModuleGetFunction)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuLaunchCooperativeKernel)
DOES_NOTHING(cuLinkAddData_v2)
DOES_NOTHING(cuLinkComplete)
DOES_NOTHING(cuLinkCreate_v2)
DOES_NOTHING(cuTensorMapEncodeTiled)
// What the allocator asks for with expandable segments: a handle is the size.
bool hollow_take(long size);
void hollow_map(uintptr_t begin, size_t size);
size_t hollow_unmap(uintptr_t begin);
int cuMemAddressReserve(uintptr_t* begin, size_t size, size_t, uintptr_t, uint64_t) {
  const size_t page = 2 << 20;
  int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* found = mmap(nullptr, size + page, PROT_READ | PROT_WRITE, how, -1, 0);
  return *begin = ((uintptr_t)found + page - 1) / page * page, found == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(uintptr_t begin, size_t size) { return munmap((void*)begin, size); }
int cuMemCreate(uint64_t* handle, size_t size, const void*, uint64_t) {
  return hollow_take(*handle = size) ? 0 : 2;  // 2: out of memory
}
int cuMemRelease(uint64_t handle) { return hollow_take(-(long)handle), 0; }
int cuMemMap(uintptr_t begin, size_t size, size_t, uint64_t, uint64_t) {
  return hollow_map(begin, size), 0;
}
int cuMemUnmap(uintptr_t begin, size_t size) {
  for (uintptr_t at = begin; at < begin + size;) at += hollow_unmap(at);
  return 0;
}
DOES_NOTHING(cuMemSetAccess)
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) {
  return *count = 2, 0;
}
int cuOccupancyMaxActiveClusters(int* count, void*, void*) { return *count = 2, 0; }
int cuPointerGetAttribute(void* value, int, uint64_t pointer) {
  return *(uint64_t*)value = pointer, 0;
}
#endif

#ifdef NVML
DOES_NOTHING(nvmlInit)
DOES_NOTHING(nvmlInit_v2)
DOES_NOTHING(nvmlShutdown)
int nvmlDeviceGetCount_v2(int* count) {
  const char* wanted = std::getenv("HOLLOW_GPUS");
  return *count = wanted ? std::atoi(wanted) : 1, 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** device) {
  return *device = (void*)(uintptr_t)(number + 1), 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  return *device = (void*)1, 0;
}
DOES_NOTHING(nvmlDeviceGetNvLinkRemoteDeviceType)
DOES_NOTHING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0; }
int nvmlDeviceGetName(void*, char* name, unsigned size) {
  return std::snprintf(name, size, "NVIDIA H200"), 0;
}
#endif
}
