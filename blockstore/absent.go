package blockstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
)

// errAbsent: the volume was not present when the store was opened.
var errAbsent = errors.New("the volume was missing when the node started; bring it back and restart")

// Absent returns a device that stands for a volume that cannot be opened. It may be an element of
// Options.Devices if Options.Degraded is set. Every request to the device fails with cause.
func Absent(path string, cause error) blockio.Device {
	return &absentDevice{path: path, cause: cause}
}

// absentDevice is the device of a volume that is missing or was removed.
type absentDevice struct {
	path  string
	cause error
}

var _ blockio.Device = (*absentDevice)(nil)

func (d *absentDevice) failure() error { return fmt.Errorf("%w: %w", errAbsent, d.cause) }

// Create implements blockio.Device.
func (d *absentDevice) Create(string, int64) (blockio.File, error) { return nil, d.failure() }

// Open implements blockio.Device.
func (d *absentDevice) Open(string) (blockio.File, error) { return nil, d.failure() }

// Remove implements blockio.Device.
func (d *absentDevice) Remove(string) error { return d.failure() }

// List implements blockio.Device.
func (d *absentDevice) List() ([]string, error) { return nil, d.failure() }

// Do implements blockio.Device.
func (d *absentDevice) Do(context.Context, []blockio.Request) error { return d.failure() }

// Sync implements blockio.Device.
func (d *absentDevice) Sync(context.Context, ...blockio.File) error { return d.failure() }

// Lock implements blockio.Device. There is nothing to lock.
func (d *absentDevice) Lock(string) error { return nil }

// Stat implements blockio.Device.
func (d *absentDevice) Stat() (blockio.SpaceStat, error) { return blockio.SpaceStat{}, d.failure() }

// Info implements blockio.Device.
func (d *absentDevice) Info() blockio.Info { return blockio.Info{Path: d.path, Backend: "none"} }

// Stats implements blockio.Device.
func (d *absentDevice) Stats() blockio.Stats { return blockio.Stats{} }

// Close implements blockio.Device.
func (d *absentDevice) Close() error { return nil }

// absent returns the cause that was given to Absent for the device, or nil for a present device.
func absent(dev blockio.Device) error {
	if d, ok := dev.(*absentDevice); ok {
		return d.cause
	}
	return nil
}

// fillAbsent adds absent devices for the volumes that are not present. found has the present
// volumes, and missing the absent devices that the caller of Open gave. The result has one
// candidate for each volume index. sharedOnly: see Options.SharedOnly.
func fillAbsent(found, missing []candidate, members membership, count int, sharedOnly bool) []candidate {
	all := make([]candidate, count)
	for _, c := range found {
		all[c.superblock.Index] = c
	}
	for i := range all {
		if all[i].formatted {
			continue
		}
		// For an absent volume only the superblock fields that all volumes share are known.
		sb := found[0].superblock
		sb.Index, sb.Volume, sb.Boot = uint32(i), ondisk.UUID{}, 0
		c := candidate{superblock: sb}
		switch {
		case members.removed.has(i):
			c.dev = Absent(fmt.Sprintf("volume-%d", i), errors.New("the volume was removed from the node"))
		case len(missing) > 0:
			c.dev, c.local, missing = missing[0].dev, missing[0].local, missing[1:]
		case sharedOnly:
			c.dev, c.local = Absent(fmt.Sprintf("volume-%d", i), errors.New("it is a local volume of the host from which the shared volumes were adopted")), true
		default:
			c.dev = Absent(fmt.Sprintf("volume-%d", i), errors.New("the volume's directory was not given"))
		}
		all[i] = c
	}
	return all
}

// Missing reports whether the volume of that index was missing when the store was
// opened.
func (s *Store) Missing(index uint32) bool {
	return int(index) < len(s.volumes) && s.volumes[index].missing
}

// MissingVolumes returns the paths of the volumes that were missing when the store was opened, if
// their paths are known.
func (s *Store) MissingVolumes() (paths []string) {
	for _, v := range s.volumes {
		if v.missing {
			paths = append(paths, v.dev.Info().Path)
		}
	}
	return paths
}

// present returns the volumes that are neither missing nor removed.
func (s *Store) present() []*volume {
	var volumes []*volume
	for _, v := range s.volumes {
		if v.counts() {
			volumes = append(volumes, v)
		}
	}
	return volumes
}

// bootMargin is added to the boot counter if too few volumes are present to be certain of the newest value, and
// bootMargin<<16 to the sequence of the catalogue if any volume is missing. The values on the missing volumes
// cannot be higher by more than that, because the store does not advance that far without the
// present volumes.
const bootMargin = 64

// counts reports whether the volume is in use: neither missing nor removed.
func (v *volume) counts() bool { return !v.missing && v.dev.health().State != health.Removed }
