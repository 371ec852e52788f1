//go:build !cgo

package main

// indexCacheOffHeap: without cgo Pebble allocates its block cache in the Go heap.
const indexCacheOffHeap = false
