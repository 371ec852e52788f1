//go:build cgo

package main

// indexCacheOffHeap: with cgo Pebble allocates its block cache in the C heap, which is not included
// in the Go runtime's memory limit.
const indexCacheOffHeap = true
