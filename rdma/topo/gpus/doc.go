// Package gpus queries the NVIDIA driver for the model, UUID and memory of its GPUs, by PCI
// address. Package topo finds the position and the NICs of GPUs without the driver.
//
// List loads the driver's library, libnvidia-ml.so.1, by github.com/NVIDIA/go-nvml. That requires
// cgo. It also requires the build tag nvml, because go-nvml relaxes the linking of the whole
// program (docs/deps.md). In a build without cgo and nvml, List returns an error. If the library
// is missing on the host, List returns an error that names the library, and the caller uses sysfs
// alone.
package gpus
