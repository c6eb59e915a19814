/* A CUDA driver that runs nothing: the functions that Triton's launcher calls, which return at once.

   cuLaunchKernelEx keeps the values of the kernel's parameters if their sizes were set by stub_set_parameters. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;

#define MAX_PARAMETERS 128

typedef struct {
  int count;
  uint32_t sizes[MAX_PARAMETERS];
} Function;

/* The fields of CUlaunchConfig up to the attributes. */
typedef struct {
  unsigned grid[3], block[3], shared;
} LaunchConfig;

/* A launch: grid, block, shared memory, and the values of all parameters. */
typedef struct {
  Function *function;
  LaunchConfig config;
  uint32_t size;
  unsigned char data[8192];
} Launch;

static Launch *launches;
static int num_launches, max_launches;

void stub_set_parameters(Function *function, int count, const uint32_t *sizes) {
  function->count = count;
  memcpy(function->sizes, sizes, count * sizeof(*sizes));
}

void stub_record(int limit) {
  free(launches);
  launches = limit ? calloc(limit, sizeof(Launch)) : NULL;
  num_launches = 0;
  max_launches = limit;
}

int stub_num_launches(void) { return num_launches; }
const Launch *stub_launch(int index) { return &launches[index]; }

CUresult cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **parameters, void **extra) {
  (void)extra;
  if (num_launches >= max_launches)
    return max_launches ? 1 : 0;
  Launch *launch = &launches[num_launches++];
  launch->function = function;
  launch->config = *config;
  for (int i = 0; i < function->count; i++) {
    if (launch->size + function->sizes[i] > sizeof(launch->data))
      return 1;
    memcpy(launch->data + launch->size, parameters[i], function->sizes[i]);
    launch->size += function->sizes[i];
  }
  return 0;
}

/* All arguments of the encoding, in a tensor map of 128 bytes. */
CUresult cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                                int interleave, int swizzle, int promotion, int fill) {
  uint64_t *words = map;
  memset(map, 0, 128);
  words[0] = (uint64_t)address;
  words[1] = type | (uint64_t)rank << 8 | interleave << 16 | swizzle << 20 | promotion << 24 | (uint64_t)fill << 28;
  for (uint32_t i = 0; i < rank; i++) {
    words[2 + i] = dims[i];
    words[7 + i] = i + 1 < rank ? strides[i] : 0;
    words[11 + i] = (uint64_t)box[i] | (uint64_t)element_strides[i] << 32;
  }
  return 0;
}

CUresult cuTensorMapEncodeIm2col(void) { return 1; }

CUresult cuModuleLoadData(void **module, const void *image) {
  (void)image;
  *module = (void *)8;
  return 0;
}

CUresult cuModuleGetFunction(Function **function, void *module, const char *name) {
  (void)module, (void)name;
  *function = calloc(1, sizeof(Function));
  return 0;
}

/* Attribute 0 is the largest block, and the others are bytes of memory. */
CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
  (void)function;
  *value = attribute == 0 ? 1024 : 0;
  return 0;
}

/* Hopper: compute capability 9.0, 227 KB of shared memory per block, 132 multiprocessors. */
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 232448 : attribute == 81 ? 233472 : 132;
  return 0;
}

CUresult cuPointerGetAttribute(void **data, int attribute, uint64_t pointer) {
  (void)attribute;
  *data = (void *)pointer;
  return 0;
}

CUresult cuPointerGetAttributes(unsigned n, const int *attributes, void **data, uint64_t pointer) {
  for (unsigned i = 0; i < n; i++)
    cuPointerGetAttribute((void **)data[i], attributes[i], pointer);
  return 0;
}

CUresult cuCtxGetCurrent(void **context) {
  *context = (void *)8;
  return 0;
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  return cuCtxGetCurrent(context);
}

CUresult cuGetErrorString(int error, const char **text) {
  (void)error;
  *text = "error of the stub driver";
  return 0;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  (void)function, (void)config;
  *clusters = 1;
  return 0;
}

CUresult cuModuleUnload(void *module) { return module == NULL; }
CUresult cuCtxGetDevice(int *device) { return *device = 0; }
CUresult cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0; }
CUresult cuCtxSetCurrent(void *context) { return context == NULL; }
CUresult cuCtxGetLimit(size_t *value, int limit) { return *value = 0, limit < 0; }
CUresult cuCtxSetLimit(int limit, size_t value) { return (void)value, limit < 0; }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return (void)attribute, (void)value, !function; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return (void)config, !function; }
