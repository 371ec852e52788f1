// Package gpus asks the NVIDIA driver what its GPUs are called: model, UUID and
// memory, by PCI address. Where they sit and which NIC is theirs is package
// topo's business, which does without the driver.
//
// The driver's library, libnvidia-ml.so.1, is loaded when List is called, by
// github.com/NVIDIA/go-nvml. That needs cgo and the build tag nvml, because it
// loosens the link of the whole program (docs/deps.md); a build without them
// answers so. A host without the library is no failure: List says what is
// missing, and sysfs alone has to do.
package gpus
