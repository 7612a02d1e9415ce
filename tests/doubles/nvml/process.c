/* Processes on a device, in the three struct versions that bindings still ask for, and their utilisation. */
#include "double.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* process_compute PID BYTES; BYTES is 2^64-1 where the driver does not know. */
static int count_of(const struct section *section, const char *key)
{
    int count = 0;
    for (int i = 0; i < section->count; i++) count += !strcmp(section->entries[i].key, key);
    return count;
}

static nvmlReturn_t add_rows(const struct section *section, const char *key, nvmlProcessInfo_v2_t *out, unsigned int *n)
{
    unsigned int instance = 0xFFFFFFFF;
    if (find_uint(section, "gpu_instance_id", &instance) != NVML_SUCCESS) instance = 0xFFFFFFFF;
    for (int i = 0; i < section->count; i++) {
        if (strcmp(section->entries[i].key, key)) continue;
        nvmlProcessInfo_v2_t info = {.gpuInstanceId = instance, .computeInstanceId = 0xFFFFFFFF};
        if (sscanf(section->entries[i].value, "%u %llu", &info.pid, &info.usedGpuMemory) != 2)
            return NVML_ERROR_INVALID_STATE;
        out[(*n)++] = info;
    }
    return NVML_SUCCESS;
}

/* A GPU lists the processes of its instances too, each with its instance. */
static nvmlReturn_t list_v2(const struct call *call, const char *key, unsigned int *count, nvmlProcessInfo_v2_t *out)
{
    int instances = call->instance == WHOLE_GPU ? call->scenario->instance_count[call->index] : 0;
    unsigned int room, n = 0, total = (unsigned int)count_of(call->gpu, key);
    for (int i = 0; i < instances; i++) total += (unsigned int)count_of(&call->scenario->instances[call->index][i], key);
    REQUIRE(count);
    room = *count;
    *count = total;
    if (total && (!out || room < total)) return NVML_ERROR_INSUFFICIENT_SIZE;
    nvmlReturn_t result = add_rows(call->gpu, key, out, &n);
    for (int i = 0; i < instances && result == NVML_SUCCESS; i++)
        result = add_rows(&call->scenario->instances[call->index][i], key, out, &n);
    return result;
}

static nvmlReturn_t list_v1(const struct call *call, const char *key, unsigned int *count, nvmlProcessInfo_v1_t *out)
{
    REQUIRE(count);
    nvmlProcessInfo_v2_t full[*count ? *count : 1];
    nvmlReturn_t result = list_v2(call, key, count, out ? full : NULL);
    if (result != NVML_SUCCESS) return result;
    for (unsigned int i = 0; i < *count; i++)
        out[i] = (nvmlProcessInfo_v1_t){.pid = full[i].pid, .usedGpuMemory = full[i].usedGpuMemory};
    return NVML_SUCCESS;
}

#define PROCESS_LISTS(kind, key) \
    nvmlReturn_t nvmlDeviceGet##kind##RunningProcesses_v3(nvmlDevice_t device, unsigned int *count, \
                                                          nvmlProcessInfo_t *infos) \
    { \
        ENTER_DEVICE(device); \
        return list_v2(&call, key, count, infos); \
    } \
    nvmlReturn_t nvmlDeviceGet##kind##RunningProcesses_v2(nvmlDevice_t device, unsigned int *count, \
                                                          nvmlProcessInfo_v2_t *infos) \
    { \
        ENTER_DEVICE(device); \
        return list_v2(&call, key, count, infos); \
    } \
    nvmlReturn_t nvmlDeviceGet##kind##RunningProcesses(nvmlDevice_t device, unsigned int *count, \
                                                       nvmlProcessInfo_v1_t *infos) \
    { \
        ENTER_DEVICE(device); \
        return list_v1(&call, key, count, infos); \
    }

PROCESS_LISTS(Compute, "process_compute")
PROCESS_LISTS(Graphics, "process_graphics")
PROCESS_LISTS(MPSCompute, "process_mps")

/* utilization_sample PID SM MEMORY ENCODER DECODER AGE_MS: each sample is AGE_MS old at every call.
 * utilization_garbage TIMESTAMP_US PID SM: given at every call, whatever was asked for. */
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out,
                                             unsigned int *count, unsigned long long last_seen_us)
{
    ENTER_DEVICE(device);
    unsigned int room, n = 0;
    struct timespec now;
    REQUIRE(count);
    room = *count;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000ULL + (unsigned long long)now.tv_nsec / 1000;
    for (int i = 0; i < call.gpu->count; i++) {
        nvmlProcessUtilizationSample_t sample = {0};
        long long age_ms;
        if (!strcmp(call.gpu->entries[i].key, "utilization_garbage")) {
            if (sscanf(call.gpu->entries[i].value, "%llu %u %u", &sample.timeStamp, &sample.pid, &sample.smUtil) != 3)
                return NVML_ERROR_INVALID_STATE;
            if (out && n < room) out[n] = sample;
            n++;
            continue;
        }
        if (strcmp(call.gpu->entries[i].key, "utilization_sample")) continue;
        if (sscanf(call.gpu->entries[i].value, "%u %u %u %u %u %lld", &sample.pid, &sample.smUtil, &sample.memUtil,
                   &sample.encUtil, &sample.decUtil, &age_ms) != 6)
            return NVML_ERROR_INVALID_STATE;
        sample.timeStamp = now_us - (unsigned long long)(age_ms * 1000);
        if (sample.timeStamp <= last_seen_us) continue;
        if (out && n < room) out[n] = sample;
        n++;
    }
    *count = n;
    if (!n) return NVML_ERROR_NOT_FOUND;
    return !out || room < n ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
