package server

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/config"
)

// Reloader compares the process with its configuration, and reloads the configuration.
// *reload.Reloader implements it; see its methods for the contracts.
type Reloader interface {
	Path() string
	Diff(ctx context.Context) ([]config.Change, error)
	Reload(ctx context.Context) ([]config.Change, error)
}

func (s *adminService) DiffConfig(ctx context.Context, _ *pb.DiffConfigRequest) (*pb.DiffConfigResponse, error) {
	if s.opts.Config == nil {
		return nil, errNoConfig
	}
	changes, err := s.opts.Config.Diff(ctx)
	if err != nil {
		return nil, refusedConfig(err)
	}
	return &pb.DiffConfigResponse{Path: s.opts.Config.Path(), Changes: changeProtos(changes)}, nil
}

func (s *adminService) ReloadConfig(ctx context.Context, _ *pb.ReloadConfigRequest) (*pb.ReloadConfigResponse, error) {
	if s.opts.Config == nil {
		return nil, errNoConfig
	}
	changes, err := s.opts.Config.Reload(ctx)
	if err != nil {
		return nil, refusedConfig(err)
	}
	return &pb.ReloadConfigResponse{Path: s.opts.Config.Path(), Changes: changeProtos(changes)}, nil
}

var errNoConfig = status.Error(codes.FailedPrecondition, "this node does not read its configuration itself, so it cannot reload it; restart it")

// refusedConfig returns the status for an error of a Reloader. The text is not shortened as those
// of other errors are, because it names each setting.
func refusedConfig(err error) error { return status.Error(codes.FailedPrecondition, err.Error()) }

func changeProtos(changes []config.Change) []*pb.ConfigChange {
	out := make([]*pb.ConfigChange, len(changes))
	for i, c := range changes {
		out[i] = &pb.ConfigChange{Key: c.Key, Running: c.Old, File: c.New, Restart: c.Restart}
	}
	return out
}
