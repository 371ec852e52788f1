// Package gpus queries the NVIDIA driver for the model, UUID and memory of its GPUs, by PCI
// address. Package topo finds their position and their NICs without the driver.
//
// List loads the driver's library, libnvidia-ml.so.1, by github.com/NVIDIA/go-nvml. That
// requires cgo and the build tag nvml, because it relaxes the linking of the whole program
// (docs/deps.md). A build without them returns an error. If the library is missing on the host,
// List returns an error that names the library, and the caller uses sysfs alone.
package gpus
