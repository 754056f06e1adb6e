/* Reads the text file that FAKE_NVML names; every nvmlInit reads it again. One fact a line, words apart by blanks:

   driver TEXT                          nvml TEXT                       cuda NUMBER (12020 for 12.2)
   gpu                                  begins the next GPU; the lines below are about it
     name TEXT                          uuid TEXT                       minor NUMBER
     bus 00000000:06:00.0               pci 0x1DB510DE 0x124910DE       (device and subsystem, vendor in the low half)
     capability 7 0                     pcie MAXGEN MAXWIDTH GEN WIDTH  (-1: NotSupported)
     pstate 8                           affinity 0-19,40-59             numa 1 (node of the GPU's own memory)
     near 1 (NUMA node of its CPU)      mig CURRENT PENDING MAX         instance UUID NAME
     c2c 1                              fabric STATE STATUS CLIQUE HEALTH SUMMARY CLUSTER (32 hexadecimal digits)
     link STATE VERSION TYPE REMOTE C0 C1 C2 C3 C4 C5    the next link; REMOTE - : not known; C: capabilities 0 to 5
     field ID SCOPE TYPE VALUE          SCOPE * : any; TYPE 0-6 as nvmlValueType_t, VALUE a whole number,
                                        or TYPE error, and VALUE the code
   p2p A B READ WRITE NVLINK ATOMICS PROP               one direction; 5 where nothing is said
   ancestor A B LEVEL                   both directions
   fail FUNCTION CODE [GPU [LINK]]      FUNCTION without or with its _v2, _v3, or the first
                                        letters and *; GPU -1: any; the first rule that fits

   What a GPU does not state, it answers with NotSupported. A line that is not understood fails nvmlInit. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nvml.h"

typedef struct {
    char function[64];
    answer code;
    int gpu, link;
} rule;

machine_text machine;
static rule rules[MAX_RULES];
static int rule_count;

answer refusal(const char *function, int gpu, int link) {
    for (int i = 0; i < rule_count; i++) {
        size_t length = strcspn(rules[i].function, "*");
        int open_end = rules[i].function[length] == '*';
        if (strncmp(function, rules[i].function, length)) continue;
        if (!open_end && function[length] && strncmp(function + length, "_v", 2)) continue;
        if (rules[i].gpu >= 0 && rules[i].gpu != gpu) continue;
        if (rules[i].link >= 0 && rules[i].link != link) continue;
        return rules[i].code;
    }
    return SUCCESS;
}

/* The rest of the line after `words` words. */
static const char *after(const char *line, int words) {
    for (; words > 0; words--) {
        while (isspace((unsigned char)*line)) line++;
        while (*line && !isspace((unsigned char)*line)) line++;
    }
    while (isspace((unsigned char)*line)) line++;
    return line;
}

static int set_affinity(gpu_device *gpu, const char *list) {
    while (*list) {
        char *end;
        long first = strtol(list, &end, 10), last = first;
        if (end == list) return 0;
        if (*end == '-') last = strtol(end + 1, &end, 10);
        if (first < 0 || last >= 16 * 64) return 0;
        for (long cpu = first; cpu <= last; cpu++) gpu->affinity[cpu / 64] |= 1ULL << (cpu % 64);
        list = *end == ',' ? end + 1 : end;
        if (*end && *end != ',') return 0;
    }
    return 1;
}

static int add_link(gpu_device *gpu, const char *line) {
    if (gpu->link_count == MAX_LINKS) return 0;
    link_end *link = &gpu->links[gpu->link_count++];
    unsigned *c = link->capabilities;
    int read = sscanf(line, "link %u %u %u %31s %u %u %u %u %u %u", &link->active, &link->version,
                      &link->remote_type, link->remote, c, c + 1, c + 2, c + 3, c + 4, c + 5);
    if (!strcmp(link->remote, "-")) link->remote[0] = 0;
    return read == 10;
}

static int add_field(gpu_device *gpu, const char *line) {
    char scope[16], type[16];
    if (gpu->field_count == MAX_FIELDS) return 0;
    field *f = &gpu->fields[gpu->field_count++];
    if (sscanf(line, "field %u %15s %15s %llu", &f->id, scope, type, &f->value) != 4) return 0;
    f->scope = strcmp(scope, "*") ? atoi(scope) : -1;
    if (!strcmp(type, "error")) {
        f->code = (answer)f->value;
        f->value = 0;
    } else {
        f->type = (unsigned)atoi(type);
    }
    return 1;
}

static int add_instance(gpu_device *gpu, const char *line) {
    if (gpu->mig_count == MAX_MIGS) return 0;
    mig_device *mig = &gpu->migs[gpu->mig_count++];
    mig->gpu = gpu->index;
    snprintf(mig->name, sizeof mig->name, "%s", after(line, 2));
    return sscanf(line, "instance %95s", mig->uuid) == 1;
}

static int set_fabric(gpu_device *gpu, const char *line) {
    char cluster[33];
    if (sscanf(line, "fabric %u %u %u %u %u %32s", &gpu->fabric_state, &gpu->fabric_status, &gpu->fabric_clique,
               &gpu->fabric_health, &gpu->fabric_summary, cluster) != 6)
        return 0;
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        if (sscanf(cluster + 2 * i, "%2x", &byte) != 1) return 0;
        gpu->fabric_cluster[i] = (unsigned char)byte;
    }
    return 1;
}

static gpu_device *add_gpu(void) {
    gpu_device *gpu = &machine.gpus[machine.gpu_count];
    gpu->index = gpu->minor = machine.gpu_count++;
    gpu->pcie_max_generation = gpu->pcie_max_width = gpu->pcie_generation = gpu->pcie_width = -1;
    gpu->pstate = gpu->numa = gpu->near_node = gpu->mig_current = gpu->c2c = -1;
    return gpu;
}

static int gpu_line(gpu_device *gpu, const char *key, const char *line) {
    const char *rest = after(line, 1);
    if (!strcmp(key, "name")) return copy_text(gpu->name, sizeof gpu->name, rest) == SUCCESS;
    if (!strcmp(key, "uuid")) return copy_text(gpu->uuid, sizeof gpu->uuid, rest) == SUCCESS;
    if (!strcmp(key, "bus")) return copy_text(gpu->bus, sizeof gpu->bus, rest) == SUCCESS;
    if (!strcmp(key, "pci")) return sscanf(rest, "%x %x", &gpu->pci_id, &gpu->pci_subsystem) == 2;
    if (!strcmp(key, "minor")) return sscanf(rest, "%d", &gpu->minor) == 1;
    if (!strcmp(key, "capability"))
        return sscanf(rest, "%d %d", &gpu->major_capability, &gpu->minor_capability) == 2;
    if (!strcmp(key, "pcie"))
        return sscanf(rest, "%d %d %d %d", &gpu->pcie_max_generation, &gpu->pcie_max_width,
                      &gpu->pcie_generation, &gpu->pcie_width) == 4;
    if (!strcmp(key, "pstate")) return sscanf(rest, "%d", &gpu->pstate) == 1;
    if (!strcmp(key, "numa")) return sscanf(rest, "%d", &gpu->numa) == 1;
    if (!strcmp(key, "near")) return sscanf(rest, "%d", &gpu->near_node) == 1 && gpu->near_node < 1024;
    if (!strcmp(key, "affinity")) return set_affinity(gpu, rest);
    if (!strcmp(key, "mig"))
        return sscanf(rest, "%d %d %d", &gpu->mig_current, &gpu->mig_pending, &gpu->mig_max) == 3;
    if (!strcmp(key, "instance")) return add_instance(gpu, line);
    if (!strcmp(key, "c2c")) return sscanf(rest, "%d", &gpu->c2c) == 1;
    if (!strcmp(key, "fabric")) return set_fabric(gpu, line);
    if (!strcmp(key, "link")) return add_link(gpu, line);
    if (!strcmp(key, "field")) return add_field(gpu, line);
    return 0;
}

static int machine_line(const char *key, const char *line) {
    const char *rest = after(line, 1);
    int a, b, level;
    if (!strcmp(key, "driver")) return copy_text(machine.driver, sizeof machine.driver, rest) == SUCCESS;
    if (!strcmp(key, "nvml")) return copy_text(machine.nvml, sizeof machine.nvml, rest) == SUCCESS;
    if (!strcmp(key, "cuda")) return sscanf(rest, "%d", &machine.cuda) == 1;
    if (!strcmp(key, "fail")) {
        if (rule_count == MAX_RULES) return 0;
        rule *r = &rules[rule_count++];
        r->gpu = r->link = -1;
        return sscanf(rest, "%63s %d %d %d", r->function, &r->code, &r->gpu, &r->link) >= 2;
    }
    if (!strcmp(key, "p2p")) {
        unsigned s[P2P_INDICES];
        if (sscanf(rest, "%d %d %u %u %u %u %u", &a, &b, s, s + 1, s + 2, s + 3, s + 4) != 7) return 0;
        if (a < 0 || b < 0 || a >= MAX_GPUS || b >= MAX_GPUS) return 0;
        for (int i = 0; i < P2P_INDICES; i++) machine.p2p[a][b][i] = (unsigned char)s[i];
        return 1;
    }
    if (!strcmp(key, "ancestor")) {
        if (sscanf(rest, "%d %d %d", &a, &b, &level) != 3) return 0;
        if (a < 0 || b < 0 || a >= MAX_GPUS || b >= MAX_GPUS) return 0;
        machine.ancestor[a][b] = machine.ancestor[b][a] = level;
        return 1;
    }
    return 0;
}

/* As the driver does without its kernel module where no file is named. */
answer read_machine(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *text = path ? fopen(path, "r") : NULL;
    char line[512], key[32];
    int number = 0;
    gpu_device *gpu = NULL;
    memset(&machine, 0, sizeof machine);
    memset(machine.p2p, 5, sizeof machine.p2p);
    rule_count = 0;
    if (!text) return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, text)) {
        int good = 1;
        number++;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, " %31s", key) != 1 || key[0] == '#') continue;
        if (!strcmp(key, "gpu"))
            good = machine.gpu_count < MAX_GPUS && (gpu = add_gpu());
        else if (!machine_line(key, after(line, 0)))
            good = gpu && gpu_line(gpu, key, after(line, 0));
        if (!good) {
            fprintf(stderr, "fake NVML: %s, line %d: cannot read: %s\n", path, number, line);
            fclose(text);
            return UNKNOWN;
        }
    }
    fclose(text);
    return SUCCESS;
}
