/* What a device says of itself at this moment. */
#include "double.h"

#include <stdio.h>
#include <time.h>

/* Getters of one number that stands under one key. */
#define UINT_GETTER(function, key) \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *value) \
    { \
        ENTER_DEVICE(device); \
        return find_uint(call.gpu, key, value); \
    }

UINT_GETTER(nvmlDeviceGetPowerUsage, "power_mw")
UINT_GETTER(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
UINT_GETTER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
UINT_GETTER(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_mw")
UINT_GETTER(nvmlDeviceGetFanSpeed, "fan_percent")

/* energy_mj START MJ_PER_SECOND SINCE_NS: grows with CLOCK_MONOTONIC from SINCE_NS on, the same in every
 * process that reads the scenario. */
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy)
{
    ENTER_DEVICE(device);
    const char *value;
    nvmlReturn_t result = find_text(call.gpu, "energy_mj", &value);
    if (result != NVML_SUCCESS) return result;
    REQUIRE(energy);
    unsigned long long start, rate;
    long long since_ns;
    struct timespec now;
    if (sscanf(value, "%llu %llu %lld", &start, &rate, &since_ns) != 3) return NVML_ERROR_INVALID_STATE;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)(now.tv_sec * 1000000000LL + now.tv_nsec - since_ns) / 1e9;
    *energy = start + (seconds > 0 ? (unsigned long long)(seconds * (double)rate) : 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *value)
{
    ENTER_DEVICE(device);
    if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    return find_uint(call.gpu, "temperature_celsius", value);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    ENTER_DEVICE(device);
    unsigned int value;
    REQUIRE(temperature);
    if (temperature->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensorType != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = find_uint(call.gpu, "temperature_celsius", &value);
    if (result == NVML_SUCCESS) temperature->temperature = (int)value;
    return result;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    ENTER_DEVICE(device);
    REQUIRE(utilization);
    nvmlReturn_t result = find_uint(call.gpu, "utilization_gpu_percent", &utilization->gpu);
    if (result != NVML_SUCCESS) return result;
    return find_uint(call.gpu, "utilization_memory_percent", &utilization->memory);
}

static nvmlReturn_t memory(const struct call *call, nvmlMemory_v2_t *out)
{
    nvmlReturn_t result = find_u64(call->gpu, "memory_total_bytes", &out->total);
    if (result == NVML_SUCCESS) result = find_u64(call->gpu, "memory_used_bytes", &out->used);
    if (result == NVML_SUCCESS) result = find_u64(call->gpu, "memory_reserved_bytes", &out->reserved);
    if (result == NVML_SUCCESS) out->free = out->total - out->used - out->reserved;
    return result;
}

/* The first form counts the reserved bytes as used, the second tells them apart. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    ENTER_DEVICE(device);
    REQUIRE(out);
    nvmlMemory_v2_t full;
    nvmlReturn_t result = memory(&call, &full);
    if (result != NVML_SUCCESS) return result;
    *out = (nvmlMemory_t){.total = full.total, .free = full.free, .used = full.used + full.reserved};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    ENTER_DEVICE(device);
    REQUIRE(out);
    if (out->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return memory(&call, out);
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *out)
{
    ENTER_DEVICE(device);
    REQUIRE(out);
    nvmlReturn_t result = find_u64(call.gpu, "bar1_total_bytes", &out->bar1Total);
    if (result == NVML_SUCCESS) result = find_u64(call.gpu, "bar1_used_bytes", &out->bar1Used);
    if (result == NVML_SUCCESS) out->bar1Free = out->bar1Total - out->bar1Used;
    return result;
}

static nvmlReturn_t clock_of(const struct call *call, const char *prefix, nvmlClockType_t type, unsigned int *mhz)
{
    static const char *const names[] = {
        [NVML_CLOCK_GRAPHICS] = "graphics",
        [NVML_CLOCK_SM] = "sm",
        [NVML_CLOCK_MEM] = "memory",
        [NVML_CLOCK_VIDEO] = "video",
    };
    char key[64];
    if ((unsigned int)type >= sizeof names / sizeof *names) return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%s_%s_mhz", prefix, names[type]);
    return find_uint(call->gpu, key, mhz);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(device);
    return clock_of(&call, "clock", type, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(device);
    return clock_of(&call, "max_clock", type, mhz);
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned int *mhz)
{
    ENTER_DEVICE(device);
    if (id == NVML_CLOCK_ID_CURRENT) return clock_of(&call, "clock", type, mhz);
    return id == NVML_CLOCK_ID_CUSTOMER_BOOST_MAX ? clock_of(&call, "max_clock", type, mhz)
                                                  : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(device);
    return find_u64(call.gpu, "clock_event_reasons", reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(device);
    return find_u64(call.gpu, "clock_event_reasons", reasons);
}
