/* MIG: a GPU split into instances. What an instance cannot tell (power, clocks, utilisation) its section
 * does not name, and the getters of device.c answer NOT_SUPPORTED. */
#include "double.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ENTER_DEVICE(device);
    REQUIRE(current && pending);
    if (call.instance != WHOLE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = find_uint(call.gpu, "mig_mode", current);
    if (result == NVML_SUCCESS) *pending = *current;
    return result;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER_DEVICE(device);
    REQUIRE(count);
    unsigned int mode;
    *count = find_uint(call.gpu, "mig_mode", &mode) == NVML_SUCCESS ? MAX_INSTANCES : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    ENTER_DEVICE(device);
    unsigned int mode;
    REQUIRE(mig && call.instance == WHOLE_GPU && index < MAX_INSTANCES);
    nvmlReturn_t result = find_uint(call.gpu, "mig_mode", &mode);
    if (result != NVML_SUCCESS) return result;
    if (index >= (unsigned int)call.scenario->instance_count[call.index]) return NVML_ERROR_NOT_FOUND;
    *mig = instance_handle(call.index, (int)index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *answer)
{
    ENTER_DEVICE(device);
    REQUIRE(answer);
    *answer = call.instance != WHOLE_GPU;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    ENTER_DEVICE(mig);
    REQUIRE(device && call.instance != WHOLE_GPU);
    *device = device_handle(call.index);
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_id(const struct call *call, const char *key, unsigned int *id)
{
    REQUIRE(id && call->instance != WHOLE_GPU);
    return find_uint(call->gpu, key, id);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(device);
    return instance_id(&call, "gpu_instance_id", id);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(device);
    return instance_id(&call, "compute_instance_id", id);
}

static nvmlReturn_t attributes_of(const struct call *call, nvmlDeviceAttributes_t *out)
{
    unsigned long long memory;
    REQUIRE(out);
    *out = (nvmlDeviceAttributes_t){0};
    nvmlReturn_t result = find_uint(call->gpu, "multiprocessors", &out->multiprocessorCount);
    if (result == NVML_SUCCESS) result = find_uint(call->gpu, "gpu_slices", &out->gpuInstanceSliceCount);
    if (result == NVML_SUCCESS) result = find_uint(call->gpu, "compute_slices", &out->computeInstanceSliceCount);
    if (result == NVML_SUCCESS) result = find_u64(call->gpu, "memory_total_bytes", &memory);
    if (result == NVML_SUCCESS) out->memorySizeMB = memory >> 20;
    return result;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ENTER_DEVICE(device);
    return attributes_of(&call, attributes);
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ENTER_DEVICE(device);
    return attributes_of(&call, attributes);
}
