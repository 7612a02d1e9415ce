/* The scenario file: `key value` lines in sections, and `fault` lines. See scenario.py, which writes it. */
#include "double.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct named_code named_codes[] = {
#include "errors.inc"
    {NULL, 0},
};

static char *text; /* the file's bytes; every string of the scenario points into it */

/* A scenario that cannot be understood must never look like a GPU: the process ends, loudly. */
static void reject(const char *path, int line, const char *why)
{
    fprintf(stderr, "nvml double: %s:%d: %s\n", path, line, why);
    abort();
}

static char *read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    size_t size = 0, room = 4096;
    char *bytes = malloc(room);
    for (;;) {
        size += fread(bytes + size, 1, room - size - 1, file);
        if (feof(file) || ferror(file)) break;
        bytes = realloc(bytes, room *= 2);
    }
    fclose(file);
    bytes[size] = '\0';
    return bytes;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

/* \xHH (lower case) and \\ in place; anything else after a backslash is an error. */
static int unescape(char *value)
{
    char *out = value;
    for (const char *in = value; *in;) {
        if (*in != '\\') {
            *out++ = *in++;
        } else if (in[1] == '\\') {
            *out++ = '\\';
            in += 2;
        } else if (in[1] == 'x' && hex_digit(in[2]) >= 0 && hex_digit(in[3]) >= 0) {
            *out++ = (char)(hex_digit(in[2]) * 16 + hex_digit(in[3]));
            in += 4;
        } else {
            return 0;
        }
    }
    *out = '\0';
    return 1;
}

static void add_entry(struct section *section, const char *key, const char *value)
{
    section->entries = realloc(section->entries, sizeof(struct entry) * (section->count + 1));
    section->entries[section->count++] = (struct entry){key, value};
}

static int parse_number(const char *value, unsigned long long *out)
{
    char *end;
    errno = 0;
    *out = strtoull(value, &end, 0);
    return *value && !*end && !errno;
}

static int parse_code(const char *value, nvmlReturn_t *out)
{
    unsigned long long number;
    if (parse_number(value, &number)) {
        *out = (nvmlReturn_t)number;
        return 1;
    }
    for (const struct named_code *row = named_codes; row->name; row++)
        if (!strcmp(row->name, value)) {
            *out = (nvmlReturn_t)row->code;
            return 1;
        }
    return 0;
}

/* fault FUNCTION GPU|- CODE DELAY_MS AFTER_CALLS */
static const char *add_fault(struct scenario *scenario, char *value)
{
    char *words[5], *rest = value;
    for (int i = 0; i < 5; i++) {
        words[i] = strtok_r(i ? NULL : value, " ", &rest);
        if (!words[i]) return "a fault has five words";
    }
    unsigned long long gpu = 0, delay, after;
    int any = !strcmp(words[1], "-");
    struct fault fault = {.pattern = words[0]};
    if (!any && !parse_number(words[1], &gpu)) return "a fault's GPU is a number or -";
    if (!parse_code(words[2], &fault.code)) return "unknown return code";
    if (!parse_number(words[3], &delay) || !parse_number(words[4], &after)) return "not a number";
    fault.gpu = any ? NO_GPU : (int)gpu;
    fault.delay_ms = (long long)delay;
    fault.after_calls = (long long)after;
    scenario->faults = realloc(scenario->faults, sizeof(struct fault) * (scenario->fault_count + 1));
    scenario->faults[scenario->fault_count++] = fault;
    return NULL;
}

static void clear(struct scenario *scenario)
{
    free(scenario->system.entries);
    for (int i = 0; i < scenario->gpu_count; i++) {
        free(scenario->gpus[i].entries);
        for (int j = 0; j < scenario->instance_count[i]; j++) free(scenario->instances[i][j].entries);
    }
    free(scenario->faults);
    free(text);
    text = NULL;
    memset(scenario, 0, sizeof *scenario);
}

static const char *add_line(struct scenario *scenario, struct section **section, char *line)
{
    char *value = strchr(line, ' ');
    if (!value) return "a line is `key value`";
    *value++ = '\0';
    if (!unescape(value)) return "bad escape";
    if (!strcmp(line, "fault")) return add_fault(scenario, value);
    if (!strcmp(line, "gpu")) {
        unsigned long long index;
        if (!parse_number(value, &index) || index != (unsigned long long)scenario->gpu_count || index >= MAX_GPUS)
            return "GPUs are numbered 0, 1, 2, ...";
        *section = &scenario->gpus[scenario->gpu_count++];
        return NULL;
    }
    if (!strcmp(line, "instance")) {
        int gpu = scenario->gpu_count - 1;
        unsigned long long index;
        if (gpu < 0 || !parse_number(value, &index)) return "an instance belongs to a GPU";
        if (index != (unsigned long long)scenario->instance_count[gpu] || index >= MAX_INSTANCES)
            return "instances are numbered 0, 1, 2, ... 6";
        *section = &scenario->instances[gpu][scenario->instance_count[gpu]++];
        return NULL;
    }
    add_entry(*section, line, value);
    return NULL;
}

/* Replace what `scenario` holds by the file at `path`; a missing file leaves it empty and not present. */
void scenario_read(struct scenario *scenario, const char *path)
{
    clear(scenario);
    text = path ? read_file(path) : NULL;
    if (!text) return;
    scenario->present = 1;
    struct section *section = &scenario->system;
    int number = 0;
    for (char *line = text, *next; line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = '\0';
        number++;
        if (!*line || *line == '#') continue;
        const char *why = add_line(scenario, &section, line);
        if (why) reject(path, number, why);
    }
}

nvmlReturn_t find_text(const struct section *section, const char *key, const char **value)
{
    for (int i = 0; i < section->count; i++)
        if (!strcmp(section->entries[i].key, key)) {
            *value = section->entries[i].value;
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t copy_text(const struct section *section, const char *key, char *out, unsigned int length)
{
    const char *value;
    nvmlReturn_t result = find_text(section, key, &value);
    if (result != NVML_SUCCESS) return result;
    REQUIRE(out);
    if (strlen(value) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, value);
    return NVML_SUCCESS;
}

nvmlReturn_t find_u64(const struct section *section, const char *key, unsigned long long *out)
{
    const char *value;
    nvmlReturn_t result = find_text(section, key, &value);
    if (result != NVML_SUCCESS) return result;
    REQUIRE(out);
    return parse_number(value, out) ? NVML_SUCCESS : NVML_ERROR_INVALID_STATE;
}

nvmlReturn_t find_uint(const struct section *section, const char *key, unsigned int *out)
{
    unsigned long long value;
    REQUIRE(out);
    nvmlReturn_t result = find_u64(section, key, &value);
    if (result == NVML_SUCCESS) *out = (unsigned int)value;
    return result;
}
