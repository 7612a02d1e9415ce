/* A double of the few functions of libcuda that gpuidle's sampler calls. */
#include "double.h"

#include <cuda.h>
#include <stdio.h>
#include <string.h>

static int initialised;

EXPORT CUresult CUDAAPI cuInit(unsigned int flags)
{
    int code = fault(__func__);
    (void)flags;
    initialised = !code;
    return code;
}

EXPORT CUresult CUDAAPI cuDeviceGetCount(int *count)
{
    *count = 1;
    return initialised ? fault(__func__) : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    char wanted[256] = "";
    const char *text = scenario_text("driver_uuid", wanted, sizeof wanted) ? wanted : own_uuid();
    int digits = 0;
    (void)device;
    text = strchr(text, '-');
    for (memset(uuid, 0, sizeof *uuid); text && *text && digits < 32; text++) {
        unsigned int digit;
        char one[2] = {*text, 0};
        if (sscanf(one, "%x", &digit) != 1) continue;
        uuid->bytes[digits / 2] |= (char)(digit << (digits % 2 ? 0 : 4));
        digits++;
    }
    return fault(__func__);
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    static int held;
    (void)device;
    *context = (CUcontext)&held;
    return fault(__func__);
}

EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    double capability = scenario_number("compute_capability", 9.0);
    int major = (int)capability;
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? major : (int)((capability - major) * 10 + 0.5);
    return CUDA_SUCCESS;
}
