/* Events: what happens to a GPU after its registration is delivered once, in order.
 *
 * event AT_NS TYPE DATA GPU_INSTANCE   lines of a GPU in order of AT_NS (CLOCK_MONOTONIC); a scenario that is
 *                                      written again repeats the lines of the one before and adds its own
 * event_types MASK                     what nvmlDeviceGetSupportedEventTypes answers
 */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POLL_MS 5

struct registration {
    int index;
    unsigned long long types;
    int seen; /* event lines that are past */
};

struct nvmlEventSet_st {
    int count;
    struct registration rows[MAX_GPUS];
};

struct event {
    long long at_ns;
    unsigned long long type, data;
    unsigned int gpu_instance;
};

/* Return 0 where the GPU has no n-th event line. */
static int event_line(const struct section *gpu, int n, struct event *out)
{
    for (int i = 0; i < gpu->count; i++) {
        if (strcmp(gpu->entries[i].key, "event") || n-- > 0) continue;
        return sscanf(gpu->entries[i].value, "%lld %llu %llu %u", &out->at_ns, &out->type, &out->data,
                      &out->gpu_instance) == 4;
    }
    return 0;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    ENTER();
    REQUIRE(set);
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    ENTER();
    REQUIRE(set);
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    ENTER_DEVICE(device);
    return call.instance == WHOLE_GPU ? find_u64(call.gpu, "event_types", types) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    ENTER_DEVICE(device);
    unsigned long long supported;
    struct event event;
    nvmlReturn_t result = find_u64(call.gpu, "event_types", &supported);
    if (result != NVML_SUCCESS || call.instance != WHOLE_GPU) return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(set && set->count < MAX_GPUS);
    if (types & ~supported) return NVML_ERROR_NOT_SUPPORTED;
    struct registration row = {.index = call.index, .types = types};
    while (event_line(call.gpu, row.seen, &event) && event.at_ns <= now_ns()) row.seen++;
    set->rows[set->count++] = row;
    return NVML_SUCCESS;
}

static int deliver(const struct scenario *scenario, nvmlEventSet_t set, nvmlEventData_t *data)
{
    for (int i = 0; i < set->count; i++) {
        struct registration *row = &set->rows[i];
        struct event event;
        if (row->index >= scenario->gpu_count) continue;
        while (event_line(&scenario->gpus[row->index], row->seen, &event) && event.at_ns <= now_ns()) {
            row->seen++;
            if (!(event.type & row->types)) continue;
            *data = (nvmlEventData_t){device_handle(row->index), event.type, event.data, event.gpu_instance, 0xFFFFFFFF};
            return 1;
        }
    }
    return 0;
}

static nvmlReturn_t wait(struct call *call, nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    REQUIRE(set && data);
    for (unsigned int waited = 0;; waited += (unsigned int)call_pause(call, POLL_MS)) {
        if (deliver(call->scenario, set, data)) return NVML_SUCCESS;
        if (waited >= timeout_ms) return NVML_ERROR_TIMEOUT;
    }
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    CALL(call_enter_events(__func__, set && set->count ? set->rows[0].index : NO_GPU));
    return wait(&call, set, data, timeout_ms);
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    CALL(call_enter_events(__func__, set && set->count ? set->rows[0].index : NO_GPU));
    return wait(&call, set, data, timeout_ms);
}
