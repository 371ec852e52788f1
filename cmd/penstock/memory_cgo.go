//go:build cgo

package main

// indexCacheOffHeap: with cgo Pebble takes its block cache from the C heap, which
// the Go runtime's limit does not count.
const indexCacheOffHeap = true
