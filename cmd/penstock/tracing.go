package main

import (
	"context"
	"fmt"
	"log/slog"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/penstock-kv/penstock/server/config"
)

// startTracing sends a span for each RPC to the collector at trace.endpoint, if the key is set,
// until stop is called. The connection is plain text, because collectors run on the same host. The
// exporter's own environment variables (OTEL_EXPORTER_OTLP_…) add headers and certificates.
func startTracing(ctx context.Context, cfg config.Trace, instance string, log *slog.Logger) (stop func(context.Context), err error) {
	if cfg.Endpoint == "" {
		return func(context.Context) {}, nil
	}
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(cfg.Endpoint), otlptracegrpc.WithInsecure())
	if err != nil {
		return nil, fmt.Errorf("trace.endpoint %s: %w", cfg.Endpoint, err)
	}
	provider := trace.NewTracerProvider(
		trace.WithBatcher(exporter),
		trace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "penstock"),
			attribute.String("service.version", readBuildInfo().String()),
			attribute.String("service.instance.id", instance),
		)),
	)
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	return func(ctx context.Context) {
		// An unreachable collector must not make the command fail after a clean stop.
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("the last spans were not sent", "err", err)
		}
	}, nil
}
