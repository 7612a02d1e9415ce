/* The driver and the list of devices. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *nvmlErrorString(nvmlReturn_t result)
{
    for (const struct named_code *row = named_codes; row->name; row++)
        if (row->code == (int)result) return row->name;
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER();
    return copy_text(&call.scenario->system, "driver_version", version, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    ENTER();
    return copy_text(&call.scenario->system, "nvml_version", version, length);
}

static nvmlReturn_t cuda_version(const struct call *call, int *version)
{
    unsigned int value;
    REQUIRE(version);
    nvmlReturn_t result = find_uint(&call->scenario->system, "cuda_version", &value);
    if (result == NVML_SUCCESS) *version = (int)value;
    return result;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    ENTER();
    return cuda_version(&call, version);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER();
    return cuda_version(&call, version);
}

/* process_name PID NAME */
nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    ENTER();
    REQUIRE(name && length);
    const struct section *system = &call.scenario->system;
    for (int i = 0; i < system->count; i++) {
        char *rest;
        if (strcmp(system->entries[i].key, "process_name")) continue;
        if (strtoull(system->entries[i].value, &rest, 10) != pid || *rest != ' ') continue;
        snprintf(name, length, "%s", rest + 1);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t device_count(const struct call *call, unsigned int *count)
{
    REQUIRE(count);
    *count = (unsigned int)call->scenario->gpu_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER();
    return device_count(&call, count);
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    ENTER();
    return device_count(&call, count);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER_INDEX(index);
    REQUIRE(device);
    *device = device_handle(call.index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    ENTER_INDEX(index);
    REQUIRE(device);
    *device = device_handle(call.index);
    return NVML_SUCCESS;
}

static nvmlReturn_t handle_by(const struct call *call, const char *key, const char *wanted, nvmlDevice_t *device)
{
    REQUIRE(wanted && device);
    for (int i = 0; i < call->scenario->gpu_count; i++) {
        const char *value;
        if (find_text(&call->scenario->gpus[i], key, &value) != NVML_SUCCESS || strcmp(value, wanted)) continue;
        *device = device_handle(i);
        return NVML_SUCCESS;
    }
    for (int i = 0; i < call->scenario->gpu_count; i++)
        for (int j = 0; j < call->scenario->instance_count[i]; j++) {
            const char *value;
            if (find_text(&call->scenario->instances[i][j], key, &value) != NVML_SUCCESS || strcmp(value, wanted))
                continue;
            *device = instance_handle(i, j);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER();
    return handle_by(&call, "uuid", uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    ENTER();
    return handle_by(&call, "pci_bus_id", bus_id, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    ENTER();
    return handle_by(&call, "pci_bus_id", bus_id, device);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER_DEVICE(device);
    REQUIRE(index);
    *index = (unsigned int)(call.instance == WHOLE_GPU ? call.index : call.instance);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    ENTER_DEVICE(device);
    REQUIRE(minor);
    *minor = (unsigned int)call.index;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER_DEVICE(device);
    return copy_text(call.gpu, "name", name, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_DEVICE(device);
    return copy_text(call.gpu, "uuid", uuid, length);
}

static nvmlReturn_t pci_info(const struct call *call, nvmlPciInfo_t *pci)
{
    const char *id;
    nvmlReturn_t result = find_text(call->gpu, "pci_bus_id", &id);
    if (result != NVML_SUCCESS) return result;
    REQUIRE(pci);
    memset(pci, 0, sizeof *pci);
    if (sscanf(id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3) return NVML_ERROR_INVALID_STATE;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(device);
    return pci_info(&call, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(device);
    return pci_info(&call, pci);
}

/* As in the driver, the oldest form has no `busId` behind the other fields: it must not be written. */
nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(device);
    REQUIRE(pci);
    nvmlPciInfo_t full;
    nvmlReturn_t result = pci_info(&call, &full);
    if (result == NVML_SUCCESS) memcpy(pci, &full, (size_t)((char *)pci->busId - (char *)pci));
    return result;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER_DEVICE(device);
    const char *value;
    REQUIRE(major && minor);
    nvmlReturn_t result = find_text(call.gpu, "compute_capability", &value);
    if (result != NVML_SUCCESS) return result;
    return sscanf(value, "%d.%d", major, minor) == 2 ? NVML_SUCCESS : NVML_ERROR_INVALID_STATE;
}
