/* GPM: samples of cumulative counters that are refreshed every 100 ms, and the means between two of them.
 *
 * gpm ID CODE SINCE_NS:VALUE ...   one line a metric: VALUE holds from SINCE_NS (CLOCK_MONOTONIC) on until
 *                                  the next pair; CODE is the metric's nvmlReturn
 * gpm_since_ns NS                  when the counters began at 0 (an instance that was created under way)
 *
 * The double is as unforgiving as the driver may be: a pair of the same refresh gives 0 with SUCCESS, and a
 * pair of two instances, or in the wrong order, gives a number that means nothing with SUCCESS. A value that
 * no counter can have (a sentinel, NaN) is given as it stands.
 */
#include "double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define REFRESH_NS 100000000LL
#define MAX_METRICS 64
#define LAST_PERCENT_ID 19 /* the ids from here on are rates */

struct counter {
    unsigned int id;
    nvmlReturn_t code;
    double sum;  /* integral up to the sample, in value times seconds */
    double last; /* the value at the sample */
};

struct nvmlGpmSample_st {
    long long at_ns; /* 0: never filled */
    int count;
    struct counter counters[MAX_METRICS];
};

static int possible(unsigned int id, double value)
{
    return value >= 0 && value <= (id <= LAST_PERCENT_ID ? 200 : 1e9);
}

/* Return 0 for a line that makes no sense. */
static int read_counter(const char *line, long long since_ns, long long at_ns, struct counter *out)
{
    char *rest;
    *out = (struct counter){.id = (unsigned int)strtoul(line, &rest, 10)};
    out->code = (nvmlReturn_t)strtoul(rest, &rest, 10);
    long long from = since_ns;
    double value = 0;
    while (*rest == ' ') {
        long long next = strtoll(rest + 1, &rest, 10);
        if (*rest != ':') return 0;
        if (next > at_ns) break;
        if (next > from && possible(out->id, value)) out->sum += value * (double)(next - from) / 1e9;
        from = next > from ? next : from;
        value = strtod(rest + 1, &rest);
    }
    if (at_ns > from && possible(out->id, value)) out->sum += value * (double)(at_ns - from) / 1e9;
    out->last = value;
    return 1;
}

static nvmlReturn_t take(const struct section *section, nvmlGpmSample_t sample)
{
    unsigned int supported;
    unsigned long long since = 0;
    nvmlReturn_t result = find_uint(section, "gpm_support", &supported);
    if (result != NVML_SUCCESS || !supported) return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(sample);
    if (find_u64(section, "gpm_since_ns", &since) != NVML_SUCCESS) since = 0;
    long long now = now_ns();
    sample->at_ns = now - now % REFRESH_NS;
    sample->count = 0;
    for (int i = 0; i < section->count && sample->count < MAX_METRICS; i++) {
        if (strcmp(section->entries[i].key, "gpm")) continue;
        if (!read_counter(section->entries[i].value, (long long)since, sample->at_ns, &sample->counters[sample->count++]))
            return NVML_ERROR_INVALID_STATE;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    ENTER_DEVICE(device);
    REQUIRE(support);
    if (support->version != NVML_GPM_SUPPORT_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return find_uint(call.gpu, "gpm_support", &support->isSupportedDevice);
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    ENTER();
    REQUIRE(sample);
    *sample = calloc(1, sizeof **sample);
    return *sample ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    ENTER();
    REQUIRE(sample);
    free(sample);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    ENTER_DEVICE(device);
    return take(call.gpu, sample);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int id, nvmlGpmSample_t sample)
{
    ENTER_DEVICE(device);
    REQUIRE(call.instance == WHOLE_GPU);
    for (int i = 0; i < call.scenario->instance_count[call.index]; i++) {
        const struct section *section = &call.scenario->instances[call.index][i];
        unsigned int found;
        if (find_uint(section, "gpu_instance_id", &found) == NVML_SUCCESS && found == id) return take(section, sample);
    }
    return NVML_ERROR_NOT_FOUND;
}

static const struct counter *counter_of(const struct nvmlGpmSample_st *sample, unsigned int id)
{
    for (int i = 0; i < sample->count; i++)
        if (sample->counters[i].id == id) return &sample->counters[i];
    return NULL;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    ENTER();
    REQUIRE(get);
    if (get->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    REQUIRE(get->sample1 && get->sample2 && get->numMetrics <= NVML_GPM_METRIC_MAX);
    REQUIRE(get->sample1->at_ns && get->sample2->at_ns);
    double seconds = (double)(get->sample2->at_ns - get->sample1->at_ns) / 1e9;
    for (unsigned int i = 0; i < get->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &get->metrics[i];
        const struct counter *first = counter_of(get->sample1, metric->metricId);
        const struct counter *second = counter_of(get->sample2, metric->metricId);
        metric->value = 0;
        metric->nvmlReturn = first && second ? second->code : NVML_ERROR_NOT_SUPPORTED;
        if (metric->nvmlReturn != NVML_SUCCESS) continue;
        if (!possible(metric->metricId, second->last))
            metric->value = second->last;
        else if (seconds != 0)
            metric->value = fabs((second->sum - first->sum) / seconds);
    }
    return NVML_SUCCESS;
}
