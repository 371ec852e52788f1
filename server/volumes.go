package server

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/server/storage"
)

// volumes returns the current state of each volume, by index.
func (s *Server) volumes() []*pb.VolumeStatus {
	var out []*pb.VolumeStatus
	for _, v := range s.node.Volumes() {
		volume := &pb.VolumeStatus{
			Index:               v.Index,
			Path:                v.Path,
			CapacityBytes:       v.CapacityBytes,
			UsedBytes:           v.Slots.UsedBytes(),
			Blocks:              v.Slots.Live,
			FilesystemFreeBytes: v.FreeSpaceBytes,
			State:               v.Health.State.String(),
			Duty:                v.Health.Duty.String(),
			BelowFloor:          v.BelowFloor,
			MovedBlocks:         v.Move.MovedBlocks,
			MovedBytes:          v.Move.MovedBytes,
			MoveFailures:        v.Move.Failures,
			Fence:               s.opts.Fence,
			Key:                 v.Key,
		}
		if v.Health.Cause != nil {
			volume.StateReason = sentence(v.Health.Cause)
		}
		if !v.Health.Since.IsZero() {
			volume.StateSinceUnixMs = v.Health.Since.UnixMilli()
		}
		if v.Health.Duty == health.Draining {
			volume.MoveBytesPerSecond = v.Move.BytesPerSecond
			if v.Move.Stalled != nil {
				volume.MoveStalled = sentence(v.Move.Stalled)
			}
		}
		for _, d := range s.opts.Volumes {
			if d.Device.Info().Path == v.Path {
				d.describe(volume)
			}
		}
		out = append(out, volume)
	}
	return out
}

func (s *adminService) ListVolumes(context.Context, *pb.ListVolumesRequest) (*pb.ListVolumesResponse, error) {
	resp := &pb.ListVolumesResponse{Volumes: s.volumes(), Pending: s.PendingErasures()}
	if s.opts.Adopter != nil {
		resp.Adopted = s.opts.Adopter.Adopted()
	}
	return resp, nil
}

// Adopter serves the shared volumes of other nodes in this process.
type Adopter interface {
	// Adopt begins to serve the volumes to which the directory path belongs. With dryRun it only
	// reports the owner and the size of the volumes.
	Adopt(ctx context.Context, path string, dryRun bool) (*pb.AdoptVolumeResponse, error)
	// Adopted returns the nodes that are served.
	Adopted() []*pb.AdoptedNode
}

func (s *adminService) AdoptVolume(ctx context.Context, req *pb.AdoptVolumeRequest) (*pb.AdoptVolumeResponse, error) {
	switch {
	case s.opts.Adopter == nil:
		return nil, status.Error(codes.FailedPrecondition, "this node is not in a cluster, or is itself adopted: only a node with cluster.etcd adopts shared volumes")
	case req.GetPath() == "":
		return nil, invalid(fmt.Errorf("the request names no directory: %w", storage.ErrRequest))
	}
	resp, err := s.opts.Adopter.Adopt(ctx, req.GetPath(), req.GetDryRun())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, sentence(err))
	}
	return resp, nil
}

func (s *adminService) DrainVolume(ctx context.Context, req *pb.DrainVolumeRequest) (*pb.DrainVolumeResponse, error) {
	v, err := s.volumeNamed(req.GetVolume())
	if err != nil {
		return nil, err
	}
	switch {
	case req.GetDryRun():
	case req.GetCancel():
		err = s.node.UndrainVolume(ctx, v.Index)
	default:
		err = s.node.DrainVolume(ctx, v.Index)
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.DrainVolumeResponse{Blocks: v.Slots.Live, Bytes: v.Slots.UsedBytes()}, nil
}

func (s *adminService) RemoveVolume(ctx context.Context, req *pb.RemoveVolumeRequest) (*pb.RemoveVolumeResponse, error) {
	v, err := s.volumeNamed(req.GetVolume())
	if err != nil {
		return nil, err
	}
	if req.GetDryRun() {
		return &pb.RemoveVolumeResponse{Blocks: v.Slots.Live, Bytes: v.Slots.UsedBytes()}, nil
	}
	lost, err := s.node.RemoveVolume(ctx, v.Index, req.GetForce())
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.RemoveVolumeResponse{Blocks: lost.Blocks, Bytes: lost.Bytes}, nil
}

func (s *Server) volumeNamed(name string) (storage.VolumeInfo, error) {
	if name == "" {
		return storage.VolumeInfo{}, invalid(fmt.Errorf("the request names no volume: %w", storage.ErrRequest))
	}
	i, err := s.node.VolumeNamed(name)
	if err != nil {
		return storage.VolumeInfo{}, statusOf(err)
	}
	return s.node.Volumes()[i], nil
}
