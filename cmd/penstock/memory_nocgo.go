//go:build !cgo

package main

// indexCacheOffHeap: without cgo Pebble takes its block cache from the Go heap.
const indexCacheOffHeap = false
