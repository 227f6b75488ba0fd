// A Vulkan driver that is another one (DRIVER) under the ids of SwiftShader, the only driver that computes on a CPU
// which Chromium accepts. SwiftShader has no float16, Mesa's driver has.
// cc -shared -fPIC -o libdriver.so mesa_in_chromium.c
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*Lookup)(void *, const char *);

static void (*plain)(void *, uint32_t *), (*chained)(void *, uint32_t *);

static void *of_driver(const char *name) {
  static void *driver;
  if (!driver) driver = dlopen(getenv("DRIVER"), RTLD_NOW | RTLD_LOCAL);
  return driver ? dlsym(driver, name) : NULL;
}

// VkPhysicalDeviceProperties begins with apiVersion, driverVersion, vendorID, deviceID.
static void named(uint32_t *properties) {
  properties[2] = 0x1AE0;
  properties[3] = 0xC0DE;
}

static void named_plain(void *device, uint32_t *properties) {
  plain(device, properties);
  named(properties);
}

// VkPhysicalDeviceProperties2 begins with sType, padding and the pointer pNext: 16 bytes.
static void named_chained(void *device, uint32_t *properties) {
  chained(device, properties);
  named(properties + 4);
}

static Function wrapped(const char *name, Function found) {
  if (found && !strcmp(name, "vkGetPhysicalDeviceProperties")) {
    plain = (void (*)(void *, uint32_t *))found;
    return (Function)named_plain;
  }
  if (found && (!strcmp(name, "vkGetPhysicalDeviceProperties2") || !strcmp(name, "vkGetPhysicalDeviceProperties2KHR"))) {
    chained = (void (*)(void *, uint32_t *))found;
    return (Function)named_chained;
  }
  return found;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
  return wrapped(name, ((Lookup)of_driver("vk_icdGetInstanceProcAddr"))(instance, name));
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
  Lookup lookup = (Lookup)of_driver("vk_icdGetPhysicalDeviceProcAddr");
  return lookup ? wrapped(name, lookup(instance, name)) : NULL;
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
  return ((int (*)(uint32_t *))of_driver("vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}
