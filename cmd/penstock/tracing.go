package main

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
)

// startTracing sends a span for each RPC to the collector of trace.endpoint. The
// connection is plain text: collectors run beside the node. The exporter's own
// environment variables (OTEL_EXPORTER_OTLP_…) add headers and certificates.
func (n *node) startTracing(ctx context.Context) error {
	if n.cfg.Trace.Endpoint == "" {
		return nil
	}
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(n.cfg.Trace.Endpoint), otlptracegrpc.WithInsecure())
	if err != nil {
		return fmt.Errorf("trace.endpoint %s: %w", n.cfg.Trace.Endpoint, err)
	}
	provider := trace.NewTracerProvider(
		trace.WithBatcher(exporter),
		trace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "penstock"),
			attribute.String("service.version", readBuildInfo().String()),
			attribute.String("service.instance.id", n.cfg.Node),
		)),
	)
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	n.onClose(func(ctx context.Context) error {
		// A collector that is gone must not make a clean stop a failure.
		if err := provider.Shutdown(ctx); err != nil {
			n.log.Warn("the last spans were not sent", "err", err)
		}
		return nil
	})
	return nil
}
