package config_test

import (
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/server/config"
)

// TestPlaces: a directory below a mount point has the same place on hosts with different mount points.
func TestPlaces(t *testing.T) {
	a := config.Cluster{Mounts: []string{"pool=/mnt/a", "inner=/mnt/a/deep/"}}
	b := config.Cluster{Mounts: []string{"pool=/data/b/", "inner=/"}}
	for dir, want := range map[string]struct{ place, there string }{
		"/mnt/a/n1":      {"pool:n1", "/data/b/n1"},
		"/mnt/a/n1/v/":   {"pool:n1/v", "/data/b/n1/v"},
		"/mnt/a":         {"pool:.", "/data/b"},
		"/mnt/a/deep/v":  {"inner:v", "/v"},
		"/mnt/ab/n1":     {"/mnt/ab/n1", "/mnt/ab/n1"},
		"/mnt/a/../x":    {"/mnt/x", "/mnt/x"},
		"/elsewhere/v/.": {"/elsewhere/v", "/elsewhere/v"},
	} {
		place := a.PlaceOf(dir)
		if place != want.place {
			t.Errorf("the place of %s is %s; want %s", dir, place, want.place)
		}
		if there, err := b.DirOf(place); err != nil || there != want.there {
			t.Errorf("%s is at %s on the other host, %v; want %s", place, there, err, want.there)
		}
	}
	for place, want := range map[string]string{
		"pool:n1":    "cluster.mounts of this node has no mount point of pool: add pool=DIRECTORY",
		"pool:../n1": "neither",
		"n1":         "neither",
	} {
		if dir, err := (config.Cluster{}).DirOf(place); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is at %s, %v; want an error with %q", place, dir, err, want)
		}
	}
}

// TestMountsAreChecked: a mount without a name or an absolute directory is refused.
func TestMountsAreChecked(t *testing.T) {
	for mounts, want := range map[string]bool{"a=/x": true, "a=/x,b=/y": true, "a=x": false, "/x": false, "=/x": false, "a:b=/x": false, "a=/x,a=/y": false} {
		c := config.Default()
		c.Data, c.Cluster.Etcd, c.Cluster.Mounts = []string{"/d"}, []string{"127.0.0.1:1"}, strings.Split(mounts, ",")
		c.EnsureDefaults()
		if err := c.Validate(); (err == nil) != want || err != nil && !strings.Contains(err.Error(), "cluster.mounts") {
			t.Errorf("mounts %s: %v", mounts, err)
		}
	}
}
